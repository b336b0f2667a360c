"""A KV cache of constant size: the rolling buffer of Mistral 7B (arXiv 2310.06825, sec. 2)."""

from __future__ import annotations

import jax.numpy as jnp

import axcore as ax
from axcore.nn import And, AttentionInputs, Contiguous, DecodingState, KVCache, Mask, SlidingWindow, TokenInfo


class RingCache(KVCache):
    """Keeps the last `window + spare` tokens of each row. The token at `index` is stored in the place `index % size`.

    Each place also stores the index of its token. The places therefore need no order, and tokens of an earlier use of
    the row can be recognized.
    """

    class Config(KVCache.Config):
        num_kv_heads: ax.PositiveInt = ax.REQUIRED
        head_dim: ax.PositiveInt = ax.REQUIRED
        value_dim: ax.NonNegativeInt | None = None
        """Features of a value; None: head_dim."""
        batch_size: ax.PositiveInt = ax.REQUIRED
        window: ax.PositiveInt = ax.REQUIRED
        """Number of tokens that a query sees. Attention's mask must not reach further back."""
        spare: ax.NonNegativeInt = 4
        """Number of tokens that can be rolled back. Rolling back further gives NaN."""

        @property
        def max_rollback(self) -> int:
            """See `KVCache.Config`."""
            return self.spare

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> RingCache.Config:
            """Sets the batch size. The size of the ring does not depend on `max_len`."""
            return self.set(batch_size=batch_size)

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs  # no parameters
        shape = (cfg.batch_size, cfg.window + cfg.spare, cfg.num_kv_heads, cfg.head_dim)
        axes = ("batch", None, "kv_head", None)
        values = cfg.head_dim if cfg.value_dim is None else cfg.value_dim
        self.keys = DecodingState(jnp.zeros(shape, self.dtypes.compute), axes=axes)
        self.values = DecodingState(jnp.zeros((*shape[:3], values), self.dtypes.compute), axes=axes)
        self.index = DecodingState(jnp.full(shape[:2], -1, jnp.int32), axes=axes[:2])  # -1 marks an empty place

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs:
        """Stores the last of the new tokens. The view contains the stored tokens and all new ones.

        Raises:
            ConfigError: the mask lets a query see tokens that the ring no longer stores.
        """
        window, reach = self.config.window, _reach(inputs.mask)
        if reach is None or reach > window:
            seen = "everything before it" if reach is None else f"{reach} tokens"
            raise ax.ConfigError(
                f"window={window}, but a query sees {seen}. "
                f"Attention's mask must contain SlidingWindow(size={window}) or a smaller one."
            )
        rows, new, size = self.rows(inputs), inputs.plain, self.config.window + self.config.spare
        slots, place = self.places(inputs, -1)  # the place of padding is -1
        first = inputs.query.index[:, :1]
        held = rows.take(self.index)
        held = jnp.where(held < first, held, -1)  # later tokens were rolled back
        oldest = jnp.maximum(first - window + 1, 0)
        lost = (held >= oldest).sum(axis=1, keepdims=True) < first - oldest  # overwritten before the rollback
        keys = jnp.concatenate([rows.take(self.keys), new.k.astype(self.dtypes.compute)], axis=1)
        values = jnp.concatenate([rows.take(self.values), new.v.astype(self.dtypes.compute)], axis=1)
        index = jnp.concatenate([held, place], axis=1)

        last = index.max(axis=1, keepdims=True)
        # `size` is out of range, so these tokens are not stored.
        at = (slots, jnp.where((place >= 0) & (place > last - size), place % size, size))
        rows.put(self.index, held)
        self.index.put(at, place)
        self.keys.put(at, new.k)
        self.values.put(at, new.v)
        q = jnp.where(lost[:, :, None, None], jnp.nan, inputs.q)
        return inputs.replace(q=q, kv=Contiguous(keys, values, TokenInfo(index, index, valid=index >= 0)))


def _reach(mask: Mask) -> int | None:
    """Number of tokens that a query may see, including itself; None: unbounded."""
    if isinstance(mask, SlidingWindow):
        return mask.size
    if isinstance(mask, And):
        return min((reach for each in mask.masks if (reach := _reach(each)) is not None), default=None)
    return None
