"""Where each token of a batch stands."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from axcore.module import DecodingState

Phase = Literal["train", "prefill", "decode"]
"""`train` includes evaluation: no KV cache. `prefill` brings prompts, `decode` a few tokens after them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachedRows:
    """The rows that KV caches hold, with the tokens of this call already in them. All layers share it.

    Attributes:
        tokens: where every token of each row stands, [batch, max_len]; `valid` is false at places that hold no token.
        lengths: places of each row up to its last token. What was cached beyond is no longer part of the row.
        slots: which row of the caches each row of the batch is; None: row i is slot i, and the batch is all of them.
        pages: the page table of each row, for caches in pages; None: a cache has its own, or no pages.
    """

    tokens: TokenInfo
    lengths: Int[Array, " batch"]
    slots: Int[Array, " batch"] | None = None
    pages: Int[Array, "batch pages_per_row"] | None = None
    phase: Phase = dataclasses.field(default="decode", metadata={"static": True})

    def take(self, state: DecodingState) -> jax.Array:
        """These rows of a layer's state [slots, ...]: [batch, ...]."""
        held: jax.Array = state[...]
        return held if self.slots is None else held[self.slots]

    def put(self, state: DecodingState, values: jax.Array) -> None:
        """Writes these rows of a layer's state."""
        if self.slots is None:
            state[...] = values.astype(state.whole.dtype)
        else:
            state.put((self.slots,), values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenInfo:
    """What attention knows of tokens besides their values.

    Attributes:
        index: int32, the place in the row; masks are about this.
        positions: int32, the place in the document; position embeddings see this. Where a place has several
            coordinates, as in an image, [batch or 1, seq, coordinates].
        segment_ids: int32, which document of a packed row; None when rows hold one document each.
        valid: false where there is no token, such as padding; None when all are tokens.
        cached: the rows that these tokens continue, while decoding; None otherwise.
    """

    index: Int[Array, "batch_or_1 seq"]
    positions: Int[Array, "batch_or_1 seq *coordinates"]
    segment_ids: Int[Array, "batch seq"] | None = None
    valid: Bool[Array, "batch_or_1 seq"] | None = None
    cached: CachedRows | None = None

    @classmethod
    def of(
        cls,
        ids: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        index: jax.Array | None = None,
        valid: jax.Array | None = None,
        cached: CachedRows | None = None,
    ) -> TokenInfo:
        """For ids [batch, seq]. They start their rows, unless `index` says otherwise."""
        if index is None:
            index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        return cls(index, index if positions is None else positions, segment_ids, valid, cached)

    def part(self, start: jax.Array | int, size: int) -> TokenInfo:
        """`size` tokens from `start` on."""

        def cut(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

        return jax.tree.map(cut, dataclasses.replace(self, cached=None))
