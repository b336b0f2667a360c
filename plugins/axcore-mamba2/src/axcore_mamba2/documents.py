"""Document boundaries within rows, and the last inputs of a row, which the next call requires."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from axcore.module import ContextError
from axcore.nn import CachedRows, TokenInfo


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of the tokens of one block of rows.

    Attributes:
        numbers: int32 [batch, seq], 0 for tokens that continue the document of the previous call, then 1, 2, ... None
            means one document that starts with this call.
        valid: bool [batch, seq], false at padding. None means that all are tokens.
        cached: the cached rows that the tokens continue while decoding.
    """

    numbers: jax.Array | None
    valid: jax.Array | None
    cached: CachedRows | None = None

    @classmethod
    def of(cls, tokens: TokenInfo, batch: int, last_segment: jax.Array | None = None) -> Documents:
        """The documents that `tokens` describe.

        A document begins at index 0 of the row and wherever the segment differs from the previous token's.

        Args:
            batch: number of rows in the call.
            last_segment: int32 [batch], the last segment of the previous call, or None if there is none.
        """
        shape = (batch, tokens.index.shape[1])
        valid = None if tokens.valid is None else jnp.broadcast_to(tokens.valid, shape)
        segments, cached = tokens.segment_ids, None if tokens.cached is None else tokens.rows
        if segments is None and last_segment is None:
            return cls(None, valid, cached)
        begins = jnp.broadcast_to(tokens.index == 0, shape)
        if segments is not None:
            first = segments[:, :1] if last_segment is None else last_segment[:, None]
            begins |= segments != jnp.concatenate([first, segments[:, :-1]], axis=1)
        if valid is not None:
            begins &= valid
        return cls(jnp.cumsum(begins, axis=1, dtype=jnp.int32), valid, cached)

    @property
    def rows(self) -> CachedRows:
        """The cached rows that the tokens continue.

        Raises:
            ContextError: the model was called without a `Decoder`.
        """
        if self.cached is None:
            raise ContextError("a layer with decoding state must be called through axcore.infer.Decoder")
        return self.cached

    def only_tokens(self, x: jax.Array) -> jax.Array:
        """x [batch, seq, features], 0 at padding."""
        return x if self.valid is None else jnp.where(self.valid[..., None], x, 0)

    def where_same(self, lag: int, x: jax.Array) -> jax.Array:
        """x [batch, seq, features], 0 where the token `lag` places earlier belongs to another document."""
        if self.numbers is None or lag == 0:
            return x
        before = jnp.pad(self.numbers, ((0, 0), (lag, 0)))[:, : x.shape[1]]
        return jnp.where((before == self.numbers)[..., None], x, 0)

    def ending(self, past: jax.Array, x: jax.Array) -> jax.Array:
        """The last `length` positions of past and x up to the last token. The next call requires them.

        Args:
            past: [batch, length, features], kept by the previous call.
            x: [batch, seq, features], from this call.

        Returns:
            [batch, length, features] in the dtype of past, 0 before the start of the last token's document.
        """
        assert self.numbers is not None
        seq, length = x.shape[1], past.shape[1]
        numbers = jnp.pad(self.numbers, ((0, 0), (length, 0)))
        row = jnp.concatenate([past, x.astype(past.dtype)], axis=1)
        row = jnp.where((numbers == self.numbers[:, -1:])[..., None], row, 0)
        if self.valid is None:
            return row[:, seq:]
        count = jnp.max(jnp.where(self.valid, jnp.arange(1, seq + 1), 0), axis=1)
        return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, length))(row, count)
