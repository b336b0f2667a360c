"""The base of KV caches that keep keys and values in arrays, as plain numbers or as codes."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Num

from axcore.config import REQUIRED, NonNegativeInt, PositiveInt
from axcore.module import DecodingState
from axcore.nn.kv.cache import KVCache
from axcore.nn.kv.codes import Scales, decoded, encoded
from axcore.nn.kv.views import Contiguous


class Arrays(NamedTuple):
    """What a cache stores, for all layers of a scanned stack.

    Attributes:
        layer: the index of the calling layer on the leading axes; empty if there are none.
        scales: None if `k` and `v` are plain numbers.
        read_as: the dtype of keys and values for attention.
    """

    k: Num[Array, "*layer *places kv_head head_dim"]
    v: Num[Array, "*layer *places kv_head value_dim"]
    layer: tuple[Int[Array, ""], ...]
    scales: Scales | None
    read_as: np.dtype[np.generic]


class ArrayCache(KVCache):
    """Base of caches that keep keys and values in arrays [*places, kv_head, dim].

    A subclass chooses the places: it calls `allocate` to create the arrays, `write` to store keys and values, and
    returns a view of `arrays`.
    """

    class Config(KVCache.Config):
        num_kv_heads: PositiveInt = REQUIRED
        head_dim: PositiveInt = REQUIRED
        value_dim: NonNegativeInt | None = None
        """Features of a value; None: head_dim."""
        dtype: Literal["int8", "float8_e4m3fn"] | None = None
        """Dtype of stored codes, which have one float32 scale for each token and head. None: keys and values are stored
        in the compute dtype."""

    config: Config
    keys: DecodingState
    values: DecodingState
    keys_scale: DecodingState | None
    values_scale: DecodingState | None

    def allocate(self, places: tuple[int, ...], axes: tuple[str | None, ...]) -> None:
        """Creates the arrays, filled with zeros.

        Args:
            places: the dimensions before those of heads and features.
            axes: their logical axes.
        """
        cfg = self.config
        shape, axes = (*places, cfg.num_kv_heads), (*axes, "kv_head")
        dtype = self.dtypes.compute if cfg.dtype is None else cfg.dtype

        def empty(dim: int) -> tuple[DecodingState, DecodingState | None]:
            numbers = DecodingState(jnp.zeros((*shape, dim), dtype), axes=(*axes, None))
            if cfg.dtype is None or dim == 0:
                return numbers, nnx.data(None)
            return numbers, DecodingState(jnp.zeros(shape, jnp.float32), axes=axes)

        self.keys, self.keys_scale = empty(cfg.head_dim)
        self.values, self.values_scale = empty(cfg.head_dim if cfg.value_dim is None else cfg.value_dim)

    def write(self, at: tuple[Int[Array, ...], ...], kv: Contiguous) -> None:
        """Stores keys and values in these places, as `DecodingState.put` does."""
        for state, scale, x in ((self.keys, self.keys_scale, kv.k), (self.values, self.values_scale, kv.v)):
            if scale is None:
                state.put(at, x)
            else:
                codes, scales = encoded(x, state.whole.dtype)
                state.put(at, codes)
                scale.put(at, scales)

    def stored(self, kv: Contiguous) -> Contiguous:
        """Keys and values as attention reads them after `write`."""
        dtype, read_as = self.config.dtype, self._read_as
        if dtype is None:
            return dataclasses.replace(kv, k=kv.k.astype(read_as), v=kv.v.astype(read_as))
        (k, k_scale), (v, v_scale) = encoded(kv.k, dtype), encoded(kv.v, dtype)
        k, v = decoded((k, v), (k_scale, v_scale), read_as)
        return dataclasses.replace(kv, k=k, v=v)

    @property
    def arrays(self) -> Arrays:
        """The stored arrays."""
        keys, values = (None if each is None else each.whole for each in (self.keys_scale, self.values_scale))
        scales = None if keys is None else (keys, values)
        return Arrays(self.keys.whole, self.values.whole, self.keys.layer, scales, self._read_as)

    @property
    def _read_as(self) -> np.dtype[np.generic]:
        return np.dtype(self.dtypes.compute)
