"""A KV cache of constant size: the rolling buffer of Mistral 7B (arXiv 2310.06825, section 2)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

import axcore as ax
from axcore.nn import ArrayCache, AttentionInputs, Contiguous, DecodingState, InCache, KVCache, KVView, TokenInfo
from axcore_ring_kv.reach import reach

LOST = 2**30
"""The end of a row that was rolled back further than its ring reaches."""


class RingCache(ArrayCache):
    """Keeps the last `window + spare` tokens of each row. The token at `index` is in the place `index % size`.

    A step of at most `spare + 1` tokens is written in place, and attention reads the ring. A longer step, such as a
    prompt, attends to a copy of the ring and to its own tokens, of which only the last are stored.
    """

    class Config(ArrayCache.Config):
        batch_size: ax.PositiveInt = ax.REQUIRED
        window: ax.PositiveInt = ax.REQUIRED
        """Number of tokens that a query sees, itself included. Attention's mask must not reach further back."""
        spare: ax.NonNegativeInt = 7
        """Number of tokens that can be rolled back, and that a step in place may have in addition to one. A row that is
        rolled back further gives NaN until it starts again."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> RingCache.Config:
            """Sets the batch size. The size of the ring does not depend on `max_len`."""
            return self.set(batch_size=batch_size)

        @property
        def max_rollback(self) -> int:
            return self.spare

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs  # no parameters
        self.allocate((cfg.batch_size, cfg.window + cfg.spare), ("batch", None))
        # One more than the largest index written since the row started, even if it was rolled back since.
        self.end = DecodingState(jnp.zeros((cfg.batch_size,), jnp.int32), axes=("batch",))

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs:
        """Stores the new tokens, and returns a view of the tokens that they see.

        Raises:
            ConfigError: the mask lets a query see tokens that the ring does not keep, or the number of rows is wrong.
        """
        self._check(inputs)
        rows, size, width = self.rows(inputs), self.config.window + self.config.spare, inputs.q.shape[1]
        start = jnp.broadcast_to(inputs.query.index[:, 0], rows.lengths.shape)
        stop = jnp.minimum(rows.lengths, rows.tokens.index.shape[1])  # tokens beyond `max_len` are not stored
        written = jnp.where(start == 0, 0, rows.take(self.end))
        follows = start <= written  # a row with a gap is invalid
        oldest = jnp.maximum(start - self.config.window + 1, 0)
        is_lost = written - size > oldest  # rolled back further than the ring reaches

        slots, place = self.places(inputs, -1)
        is_stored = follows & ~is_lost  # an invalid row must not overwrite tokens, nor store NaN
        kept = (place >= 0) & (place < stop[:, None]) & (place >= stop[:, None] - size) & is_stored[:, None]
        at = slots, jnp.where(kept, place % size, size)  # `size` is out of range, so the write is dropped
        rows.put(self.end, jnp.where(is_lost, LOST, jnp.where(is_stored, jnp.maximum(written, stop), written)))
        if width <= self.config.spare + 1:
            self.write(at, inputs.plain)
            view: KVView = self._ring(inputs, stop, written, start)
        else:
            old, new = self._ring(inputs, start, written, start).gathered(), self.stored(inputs.plain)
            self.write(at, inputs.plain)
            view = _joined(old, new, jnp.where(place < stop[:, None], place, -1))
        q = jnp.where(is_lost[:, None, None, None], jnp.nan, inputs.q)
        return inputs.replace(q=q, kv=view)

    def _ring(
        self,
        inputs: AttentionInputs,
        stop: Int[Array, " batch"],
        written: Int[Array, " batch"],
        start: Int[Array, " batch"],
    ) -> InCache:
        """A view of the ring when its rows have `stop` tokens, of which those from `start` on are written last."""
        size, rows = self.config.window + self.config.spare, self.rows(inputs)
        last = stop[:, None] - 1
        index = last - (last - jnp.arange(size, dtype=jnp.int32)) % size  # the last one in each place
        is_new = (index >= start[:, None]) & (index < stop[:, None])
        valid = (index >= 0) & (is_new | (index + size >= written[:, None]))
        tokens = TokenInfo(index, index, valid=valid)
        k, v, layer, scales, read_as = self.arrays
        return InCache(k, v, tokens, layer, rows.slots, scales, read_as)

    def _check(self, inputs: AttentionInputs) -> None:
        window, batch_size, found = self.config.window, self.config.batch_size, reach(inputs.mask)
        if found is None or found > window:
            seen = "all earlier tokens" if found is None else f"{found} tokens"
            raise ax.ConfigError(
                f"{self.frame.path}: window={window}, but a query sees {seen}. Use a mask with "
                f"SlidingWindow(size={window}) or less, or another cache in this layer"
            )
        if self.rows(inputs).slots is None and inputs.q.shape[0] != batch_size:
            raise ax.ConfigError(
                f"{self.frame.path}: the cache requires batch_size={batch_size} rows, got {inputs.q.shape[0]}; pass "
                f"{batch_size} rows, or the slot of each row"
            )


def _joined(old: Contiguous, new: Contiguous, index: Int[Array, "batch query"]) -> Contiguous:
    """The keys and values of the ring, then those of the step. The index of a token that is not valid is negative."""
    k, v = (jnp.concatenate(pair, axis=1) for pair in ((old.k, new.k), (old.v, new.v)))
    old_valid = old.tokens.valid
    assert old_valid is not None
    whole = jnp.concatenate([old.tokens.index, index], axis=1)
    valid = jnp.concatenate([old_valid, index >= 0], axis=1)
    return Contiguous(k, v, TokenInfo(whole, whole, valid=valid))
