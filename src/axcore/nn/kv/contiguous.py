"""A KV cache in plain arrays."""

from __future__ import annotations

import jax.numpy as jnp

from axcore.config import REQUIRED, ConfigError, PositiveInt
from axcore.module import DecodingState, Rngs
from axcore.nn.attention.inputs import AttentionInputs, Heads
from axcore.nn.kv.cache import KVCache
from axcore.nn.kv.views import Contiguous, InCache, KVView


class ContiguousCache(KVCache):
    """Stores keys and values as [batch_size, max_len, kv_head, head_dim] arrays in the compute dtype."""

    class Config(KVCache.Config):
        num_kv_heads: PositiveInt = REQUIRED
        head_dim: PositiveInt = REQUIRED
        value_dim: PositiveInt | None = None
        """Features of a value; None: head_dim."""
        batch_size: PositiveInt = REQUIRED
        max_len: PositiveInt = REQUIRED
        """Largest number of tokens in a row. Later tokens are not stored."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> KVCache.Config:
            return self.set(batch_size=batch_size, max_len=max_len)

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        shape = (cfg.batch_size, cfg.max_len, cfg.num_kv_heads, cfg.head_dim)
        axes = ("batch", "kv_seq", "kv_head", None)
        value_dim = cfg.head_dim if cfg.value_dim is None else cfg.value_dim
        self.keys = DecodingState(jnp.zeros(shape, self.dtypes.compute), axes=axes)
        self.values = DecodingState(jnp.zeros((*shape[:3], value_dim), self.dtypes.compute), axes=axes)

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs | Heads:
        """See `KVCache`."""
        rows, new, batch_size = self.rows(inputs), inputs.plain, self.config.batch_size
        if rows.slots is None and inputs.q.shape[0] != batch_size:
            raise ConfigError(
                f"{self.frame.path}: the cache requires batch_size={batch_size} rows, got {inputs.q.shape[0]}; pass "
                f"{batch_size} rows, or the slot of each row"
            )
        at = self.places(inputs, self.config.max_len)
        self.keys.put(at, new.k)
        self.values.put(at, new.v)
        keys, values, layer = self.keys.whole, self.values.whole, self.keys.layer
        view: KVView = InCache(keys, values, rows.tokens, layer, rows.slots)
        if rows.slots is None and not layer:
            view = Contiguous(keys, values, rows.tokens)
        return inputs.replace(kv=view)
