"""A KV cache whose memory does not grow with the row: the rolling buffer of Mistral 7B (arXiv 2310.06825, sec. 2)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import And, DecodingState, KVCache, Mask, SlidingWindow, TokenInfo
from axcore.nn.kv_cache import Attend


class RingCache(KVCache):
    """Keeps the last `window` tokens of each row: the token at `index` lies in the slot `index % window`.

    Each slot stores the index of its token. So it needs no order, and what is left of an earlier use of the row can be
    told from what belongs to it.
    """

    class Config(KVCache.Config):
        num_kv_heads: int = ax.REQUIRED
        head_dim: int = ax.REQUIRED
        batch_size: int = ax.REQUIRED
        window: int = ax.REQUIRED
        """Tokens that are kept; attention's mask must not reach further back."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> RingCache.Config:
            """What decoding knows and attention does not; `max_len` is of no concern here."""
            return self.set(batch_size=batch_size)

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs  # no parameters
        ax.at_least(cfg, 1, "batch_size", "window")
        shape, axes = (cfg.batch_size, cfg.window, cfg.num_kv_heads, cfg.head_dim), ("batch", None, "heads", None)
        self.keys = DecodingState(jnp.zeros(shape, self.dtypes.compute), axes=axes)
        self.values = DecodingState(jnp.zeros(shape, self.dtypes.compute), axes=axes)
        self.index = DecodingState(jnp.full(shape[:2], -1, jnp.int32), axes=axes[:2])  # -1: an empty slot
        self.positions = DecodingState(jnp.zeros(shape[:2], jnp.int32), axes=axes[:2])
        self.segment_ids = DecodingState(jnp.zeros(shape[:2], jnp.int32), axes=axes[:2])

    def __call__(self, q: jax.Array, k: Any, v: Any, mask: Mask, tokens: TokenInfo, attend: Attend) -> jax.Array:
        """See `KVCache`.

        Raises:
            ConfigError: the mask lets a query see what the ring has forgotten.
        """
        window, reach = self.config.window, _reach(mask)
        if reach is None or reach > window:
            seen = "everything before it" if reach is None else f"{reach} tokens"
            raise ax.ConfigError(
                f"window={window}, but a query sees {seen}; "
                f"attention's mask must hold SlidingWindow(size={window}) or a smaller one"
            )
        return super().__call__(q, k, v, mask, tokens, attend)

    def update(self, k: jax.Array, v: jax.Array, tokens: TokenInfo) -> tuple[jax.Array, jax.Array, TokenInfo]:
        """Stores the last of these tokens; returns what was held and all of them, for the first see further back."""
        shape, window = k.shape[:2], self.config.window
        index = jnp.broadcast_to(tokens.index, shape)
        exists = jnp.ones(shape, bool) if tokens.valid is None else jnp.broadcast_to(tokens.valid, shape)
        new = {
            "keys": k,
            "values": v,
            "index": jnp.where(exists, index, -1),
            "positions": jnp.broadcast_to(tokens.positions, shape),
            "segment_ids": jnp.broadcast_to(0 if tokens.segment_ids is None else tokens.segment_ids, shape),
        }
        held = {name: getattr(self, name)[...] for name in new}
        new = {name: value.astype(held[name].dtype) for name, value in new.items()}
        # What does not come before these tokens was written before the row started over.
        held["index"] = jnp.where(held["index"] < index[:, :1], held["index"], -1)
        both = {name: jnp.concatenate([held[name], new[name]], axis=1) for name in new}

        last = new["index"].max(axis=1, keepdims=True)
        slots = jnp.where(exists & (index > last - window), index % window, window)  # slot `window` does not exist
        rows = jnp.arange(shape[0])[:, None]
        for name, value in new.items():
            getattr(self, name)[...] = held[name].at[rows, slots].set(value, mode="drop")
        where = TokenInfo(
            index=both["index"],
            positions=both["positions"],
            segment_ids=None if tokens.segment_ids is None else both["segment_ids"],
            valid=both["index"] >= 0,
        )
        return both["keys"], both["values"], where


def _reach(mask: Mask) -> int | None:
    """How many tokens back a query may see, itself counted; None where nothing bounds it."""
    if isinstance(mask, SlidingWindow):
        return mask.size
    if isinstance(mask, And):
        return min((reach for each in mask.masks if (reach := _reach(each)) is not None), default=None)
    return None
