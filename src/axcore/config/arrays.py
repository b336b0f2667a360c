"""Arrays in configs. Since it imports NumPy, this module is imported when a config holds or reads its first array."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import numpy as np

from axcore.config.errors import ConfigError

BASE = np.ndarray

_SHOWN = 16
"""Arrays of at most this many elements are displayed as a list."""


def frozen(array: object) -> object:
    """The array itself if it is a jax array, otherwise a copy that cannot be written to.

    Raises:
        ConfigError: The array has no values or is not an array of numbers.
    """
    try:
        held = np.asarray(array)
    except Exception as error:  # a tracer, a typed PRNG key, shards of another process
        raise ConfigError(f"{type(array).__name__} has no values that a config can hold: {error}") from None
    if held.dtype.hasobject or held.dtype.names or held.dtype.kind in "USMm" or isinstance(array, np.ma.MaskedArray):
        raise ConfigError(f"a config can hold arrays of numbers, not {type(array).__name__} of {held.dtype}")
    if not isinstance(array, np.ndarray):
        return array
    copy = np.array(held, dtype=held.dtype.newbyteorder("="), order="C")
    copy.flags.writeable = False
    return copy


def write(array: object) -> dict[str, object]:
    """The array as JSON."""
    held = np.ascontiguousarray(array)
    data = base64.b64encode(held.tobytes()).decode()
    return {"dtype": held.dtype.name, "shape": list(np.shape(held)), "data": data}


def read(content: Any) -> np.ndarray:  # Any: JSON
    """The array that `write` wrote."""
    data = base64.b64decode(content["data"], validate=True)
    return np.frombuffer(data, _dtype(content["dtype"])).reshape(content["shape"])  # read-only, like `data`


def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def show(array: object) -> str:
    """The dtype and shape, with the values or, if there are many, their SHA-256."""
    held = np.asarray(array)
    name = f"{held.dtype.name}[{','.join(map(str, held.shape))}]"
    if held.size <= _SHOWN:
        return f"{name}({held.tolist()})"
    return f"{name}#{hashlib.sha256(held.tobytes()).hexdigest()}"


def is_scalar(cls: type) -> bool:
    """Whether the class is one of NumPy's scalars."""
    return issubclass(cls, np.generic)
