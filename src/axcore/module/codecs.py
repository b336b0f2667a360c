"""How configs write number types and partition specs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

from axcore.config import Codec, register_codec


def _write_spec(spec: PartitionSpec) -> list[object]:
    return [list(axes) if isinstance(axes, tuple) else axes for axes in spec]


def _read_spec(content: list[object]) -> PartitionSpec:
    return PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in content))


def _read_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


register_codec(np.dtype, Codec("dtype", lambda dtype: dtype.name, _read_dtype, lambda dtype: dtype.name))
register_codec(PartitionSpec, Codec("spec", _write_spec, _read_spec))
