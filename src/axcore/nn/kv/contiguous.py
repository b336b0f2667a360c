"""A KV cache with one row of places per slot."""

from __future__ import annotations

from axcore.config import REQUIRED, ConfigError, PositiveInt
from axcore.module import Rngs
from axcore.nn.attention.inputs import AttentionInputs, Heads
from axcore.nn.kv.arrays import ArrayCache
from axcore.nn.kv.cache import KVCache
from axcore.nn.kv.views import Contiguous, InCache, KVView


class ContiguousCache(ArrayCache):
    """Stores keys and values as [batch_size, max_len, kv_head, head_dim] arrays."""

    class Config(ArrayCache.Config):
        batch_size: PositiveInt = REQUIRED
        max_len: PositiveInt = REQUIRED
        """Largest number of tokens in a row. Later tokens are not stored."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> KVCache.Config:
            return self.set(batch_size=batch_size, max_len=max_len)

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        self.allocate((cfg.batch_size, cfg.max_len), ("batch", "kv_seq"))

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs | Heads:
        """See `KVCache`."""
        rows, batch_size = self.rows(inputs), self.config.batch_size
        if rows.slots is None and inputs.q.shape[0] != batch_size:
            raise ConfigError(
                f"{self.frame.path}: the cache requires batch_size={batch_size} rows, got {inputs.q.shape[0]}; pass "
                f"{batch_size} rows, or the slot of each row"
            )
        self.write(self.places(inputs, self.config.max_len), inputs.plain)
        keys, values, layer, scales, read_as = self.arrays
        view: KVView = InCache(keys, values, rows.tokens, layer, rows.slots, scales, read_as)
        if rows.slots is None and not layer and scales is None:
            view = Contiguous(keys, values, rows.tokens)
        return inputs.replace(kv=view)
