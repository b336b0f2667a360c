"""How configs write partition specs."""

from __future__ import annotations

from jax.sharding import PartitionSpec

from axcore.config import Codec, register_codec


def _write(spec: PartitionSpec) -> list[object]:
    return [list(axes) if isinstance(axes, tuple) else axes for axes in spec]


def _read(content: list[object]) -> PartitionSpec:
    return PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in content))


register_codec(PartitionSpec, Codec("spec", _write, _read))
