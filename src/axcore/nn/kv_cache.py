"""KV caches: keys and values of earlier calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axcore.config import REQUIRED, Config, ConfigError, at_least
from axcore.config.tree import transform
from axcore.module import Layer, Rngs
from axcore.nn.masks import Mask
from axcore.nn.tokens import TokenInfo

Attend = Callable[[jax.Array, jax.Array, jax.Array, Mask, TokenInfo, TokenInfo], jax.Array]
"""`(q, k, v, mask, query, key) -> heads`: attention's kernel, as `AttentionKernel.__call__` says."""


class DecodingState(nnx.Variable[Any]):
    """What a layer keeps from one decoding call to the next. It is no parameter: `axcore.functional` hands it out with
    the other state, to be passed in, donated and sharded like any array."""


class KVCache(Layer):
    """Base of the layers that fill attention's cache slot. A cache owns its layout: nobody else reads it.

    A cache that only stores implements `update`. One that reads in its own way (pages, other numbers, the keys of
    another layer) overrides `__call__`.
    """

    class Config(Layer.Config):
        """Fields of the cache; attention offers `input_dim`, `num_heads`, `num_kv_heads` and `head_dim`."""

        def build(self, *args: Any, **kwargs: Any) -> Any:
            """See `Config.build`."""
            sizes = [name for name in ("batch_size", "max_len") if getattr(self, name, None) is REQUIRED]
            if sizes:
                raise ConfigError(
                    f"{' and '.join(sizes)} of the KV cache: decoding sets them. Leave the slot empty and pass the "
                    f"cache as cache=... to axcore.infer.generate or Decoder.of, or set them"
                )
            return super().build(*args, **kwargs)

    def __call__(self, q: jax.Array, k: Any, v: Any, mask: Mask, tokens: TokenInfo, attend: Attend) -> jax.Array:
        """Stores the keys and values of these tokens and attends over all that are stored.

        Args:
            q: [batch, seq, head, head_dim].
            k, v: [batch, seq, kv_head, head_dim]; None where attention has no projection of its own for them.
            tokens: where q, k and v stand; `index` says after how many earlier tokens.

        Returns:
            [batch, seq, head, head_dim].
        """
        keys, values, where = self.update(k, v, tokens)
        return attend(q, keys, values, mask, tokens, where)

    def update(self, k: jax.Array, v: jax.Array, tokens: TokenInfo) -> tuple[jax.Array, jax.Array, TokenInfo]:
        """Stores k and v; returns all stored keys and values [batch, kv_seq, kv_head, head_dim], and where they stand.
        What was not written yet is not `valid`."""
        raise NotImplementedError


class ContiguousCache(KVCache):
    """One slot for each place in the row: [batch, max_len, kv_head, head_dim] for keys and for values."""

    class Config(KVCache.Config):
        num_kv_heads: int = REQUIRED
        head_dim: int = REQUIRED
        value_dim: int | None = None
        """Features of each value; None: head_dim."""
        batch_size: int = REQUIRED
        max_len: int = REQUIRED
        """Places in a row. What is attended from beyond it is NaN: it could not be stored."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> KVCache.Config:
            return self.set(batch_size=batch_size, max_len=max_len)

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "num_kv_heads", "head_dim", "batch_size", "max_len")
        shape, axes = (cfg.batch_size, cfg.max_len, cfg.num_kv_heads, cfg.head_dim), ("batch", None, "kv_head", None)
        value_dim = cfg.head_dim if cfg.value_dim is None else cfg.value_dim
        self.keys = DecodingState(jnp.zeros(shape, self.dtypes.compute), axes=axes)
        self.values = DecodingState(jnp.zeros((*shape[:3], value_dim), self.dtypes.compute), axes=axes)
        self.positions = DecodingState(jnp.zeros(shape[:2], jnp.int32), axes=axes[:2])
        self.segment_ids = DecodingState(jnp.zeros(shape[:2], jnp.int32), axes=axes[:2])
        self.written = DecodingState(jnp.zeros(shape[:2], bool), axes=axes[:2])

    def __call__(self, q: jax.Array, k: Any, v: Any, mask: Mask, tokens: TokenInfo, attend: Attend) -> jax.Array:
        """See `KVCache`."""
        heads = super().__call__(q, k, v, mask, tokens, attend)
        fits = (tokens.index >= 0) & (tokens.index < self.config.max_len)
        return jnp.where(fits[:, :, None, None], heads, jnp.nan)

    def update(self, k: jax.Array, v: jax.Array, tokens: TokenInfo) -> tuple[jax.Array, jax.Array, TokenInfo]:
        cfg = self.config
        if k.shape[0] != cfg.batch_size:
            raise ConfigError(
                f"the cache was made for batch_size={cfg.batch_size}; it was called with {k.shape[0]} rows"
            )
        # A negative place would count from the end; beyond the end it is dropped.
        place = jnp.broadcast_to(jnp.where(tokens.index < 0, cfg.max_len, tokens.index), k.shape[:2])
        rows = jnp.arange(cfg.batch_size)[:, None]
        exists = True if tokens.valid is None else tokens.valid
        positions = tokens.positions if tokens.positions.ndim == 2 else tokens.positions[..., 0]
        news = {"keys": k, "values": v, "positions": positions, "written": exists}
        if tokens.segment_ids is not None:
            news["segment_ids"] = tokens.segment_ids
        for name, new in news.items():
            variable = getattr(self, name)
            held = variable[...]
            new = jnp.broadcast_to(jnp.asarray(new, held.dtype), (*place.shape, *held.shape[2:]))
            variable[...] = held.at[rows, place].set(new, mode="drop")
        where = TokenInfo(
            index=jnp.arange(cfg.max_len, dtype=jnp.int32)[None],
            positions=self.positions[...],
            segment_ids=None if tokens.segment_ids is None else self.segment_ids[...],
            valid=self.written[...],
        )
        return self.keys[...], self.values[...], where


def for_decoding(cfg: Config, *, batch_size: int, max_len: int, cache: KVCache.Config) -> Any:
    """The config of the same model, with every layer keeping what its next call needs.

    A node takes part by a method `for_decoding(batch_size, max_len, cache) -> Config`, as `Attention.Config` does;
    parameters keep their paths.

    Args:
        cache: for every attention whose cache slot is empty.
    """
    if hasattr(cache, "for_decoding"):
        cache = cache.for_decoding(batch_size, max_len, cache)

    def prepare(_: str, node: Config) -> Config:
        return node.for_decoding(batch_size, max_len, cache) if hasattr(node, "for_decoding") else node

    return transform(cfg, prepare)
