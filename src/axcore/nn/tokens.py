"""The position, document and validity of each token of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from axcore.module import ContextError, DecodingState, current

ADAPTERS = "adapters"
"""The name under which the caller of a model shares the adapter of each token: a `PerToken` of int32 [batch, seq], the
slot of the adapter, or -1 for none. See `Layer.shared`."""

Phase = Literal["train", "prefill", "decode"]
"""`train` is any call without a KV cache, evaluation included. `prefill` processes prompts, `decode` a few tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachedRows:
    """The rows in KV caches, including the tokens of this call. All layers share one object.

    Attributes:
        tokens: the cached tokens of each row, [batch or 1, max_len]; `valid` is false at positions without a token.
        lengths: length of each row, including the tokens of this call. Cache contents beyond it are stale.
        slots: the slot of each row of the batch in the caches; None: row i is in slot i, and every slot has a row.
        pages: the page table of each row, for paged caches; None: the caches have no pages or their own page tables.
        phase: prefill or decoding.
    """

    tokens: TokenInfo
    lengths: Int[Array, " batch"]
    slots: Int[Array, " batch"] | None = None
    pages: Int[Array, "batch pages_per_row"] | None = None
    phase: Phase = dataclasses.field(default="decode", metadata={"static": True})

    def take(self, state: DecodingState) -> Shaped[Array, "batch ..."]:
        """Reads these rows of a layer's state [slots, ...]."""
        held: jax.Array = state[...]
        return held if self.slots is None else held[self.slots]

    def put(self, state: DecodingState, values: Shaped[Array, "batch ..."]) -> None:
        """Writes values to these rows of a layer's state, in the dtype of the state."""
        if self.slots is None:
            state[...] = values.astype(state.whole.dtype)
        else:
            state.put((self.slots,), values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachedBlocks:
    """The rows of a call that computes rows of several widths together, such as one token of each row that decodes and
    parts of some prompts.

    The tokens of the call are flat, [1, seq]: those of the first block, row by row, then those of the next. A layer
    that treats each token by itself reads its weights once for all of them. A layer with decoding state computes each
    block by itself: `BaseAttention`, `Recurrent` and `Windowed` call `TokenInfo.split` and `join` for it.

    Attributes:
        blocks: the tokens of each block [rows, width], with the `CachedRows` that they continue. No slot has new tokens
            in two blocks.
    """

    blocks: tuple[TokenInfo, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenInfo:
    """The position, document and validity of each token, as attention uses them.

    Attributes:
        index: int32, the position in the row, which masks compare.
        positions: int32, the position in the document, for position embeddings. With several coordinates, as in an
            image, [batch or 1, seq, coordinates].
        segment_ids: int32, the document of each token of a packed row; None if each row is one document. Batches number
            documents from 1, and padding is 0.
        valid: false at padding; None if there is no padding.
        cached: the cached rows that these tokens continue, in several blocks if the tokens are flat; None unless
            decoding.
        valid_first: whether the valid tokens of each row come first, in ascending order of `index`, as in most KV
            caches.
    """

    index: Int[Array, "batch_or_1 seq"]
    positions: Int[Array, "batch_or_1 seq *coordinates"]
    segment_ids: Int[Array, "batch seq"] | None = None
    valid: Bool[Array, "batch_or_1 seq"] | None = None
    cached: CachedRows | CachedBlocks | None = None
    valid_first: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def of(
        cls,
        ids: Int[Array, "batch seq"],
        positions: Int[Array, "batch_or_1 seq *coordinates"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        index: Int[Array, "batch_or_1 seq"] | None = None,
        valid: Bool[Array, "batch_or_1 seq"] | None = None,
        cached: CachedRows | CachedBlocks | None = None,
    ) -> TokenInfo:
        """The tokens of `ids`. `index` defaults to 0, 1, ..., and `positions` to `index`."""
        if index is None:
            index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        return cls(index, index if positions is None else positions, segment_ids, valid, cached)

    @property
    def counted(self) -> Bool[Array, "batch_or_1 seq"] | None:
        """False at padding, which statistics over tokens leave out; None if there is no padding."""
        packed = None if self.segment_ids is None else self.segment_ids != 0
        if packed is None or self.valid is None:
            return self.valid if packed is None else packed
        return packed & self.valid

    @property
    def rows(self) -> CachedRows:
        """The cached rows that the tokens of a block continue.

        Raises:
            ContextError: the model was called without a `Decoder`, or the tokens are those of several blocks.
        """
        if isinstance(self.cached, CachedRows):
            return self.cached
        if self.cached is None:
            raise ContextError("a layer with decoding state must be called through axcore.infer.Decoder")
        raise ContextError(
            "a layer with decoding state must compute each block of rows by itself: use axcore.nn.Recurrent or Windowed"
        )

    @property
    def blocks(self) -> tuple[TokenInfo, ...]:
        """The tokens of each block of rows; only these tokens, unless they are those of several blocks."""
        return self.cached.blocks if isinstance(self.cached, CachedBlocks) else (self,)

    def split(self, x: Shaped[Array, "batch seq ..."]) -> tuple[Shaped[Array, "rows width ..."], ...]:
        """An array with an entry for each token, in the shape of each of `blocks`."""
        if not isinstance(self.cached, CachedBlocks):
            return (x,)
        parts, start = [], 0
        for block in self.blocks:
            stop = start + block.index.size
            parts.append(x[0, start:stop].reshape(*block.index.shape, *x.shape[2:]))
            start = stop
        return tuple(parts)

    def join(self, parts: Sequence[Shaped[Array, "rows width ..."]]) -> Shaped[Array, "batch seq ..."]:
        """The inverse of `split`."""
        if not isinstance(self.cached, CachedBlocks):
            return parts[0]
        return jnp.concatenate([x.reshape(1, -1, *x.shape[2:]) for x in parts], axis=1)

    def part(self, start: Int[Array, ""] | int, size: int) -> TokenInfo:
        """`size` tokens from `start` on, without `cached`."""

        def cut(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

        return jax.tree.map(cut, dataclasses.replace(self, cached=None))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerToken:
    """A shared value with an entry for each token of a call (see `Layer.share`). It follows the tokens that a model
    selects with `take_tokens`."""

    values: Shaped[Array, "batch seq ..."]


def take_tokens(
    x: Float[Array, "batch seq features"], at: Int[Array, "batch chosen"]
) -> Float[Array, "batch chosen features"]:
    """The features of some tokens. Layers that are called later find the `PerToken` values of these tokens.

    Args:
        x: features of all tokens.
        at: indices into `seq`.

    Raises:
        ContextError: no call of a layer is active.
    """

    def take(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)

    shared = current().shared
    shared.update({name: PerToken(take(value.values)) for name, value in shared.items() if isinstance(value, PerToken)})
    return take(x)
