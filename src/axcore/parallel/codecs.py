"""The codec of partition specs in configs."""

from __future__ import annotations

from jax.sharding import PartitionSpec

from axcore.config import Codec, register_codec

_Entry = str | list[str] | None


def _write(spec: PartitionSpec) -> list[_Entry]:
    return [list(axes) if isinstance(axes, tuple) else axes for axes in spec]


def _read(content: list[_Entry]) -> PartitionSpec:
    return PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in content))


register_codec(PartitionSpec, Codec("spec", _write, _read))
