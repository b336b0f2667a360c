"""Where each token of a batch stands."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenInfo:
    """What attention knows of tokens besides their values.

    Attributes:
        index: int32 [batch or 1, seq], the place in the row; causality is about this.
        positions: int32 [batch or 1, seq], the place in the document; position embeddings see this. Where a place has
            several coordinates, as in an image, [batch or 1, seq, coordinates].
        segment_ids: int32 [batch, seq], which document of a packed row; None when rows hold one document each.
        valid: bool [batch or 1, seq], false where there is no token, as in a part of a KV cache that nobody wrote yet;
            None when all are tokens.
    """

    index: jax.Array
    positions: jax.Array
    segment_ids: jax.Array | None = None
    valid: jax.Array | None = None

    @classmethod
    def of(
        cls,
        ids: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        index: jax.Array | None = None,
        valid: jax.Array | None = None,
    ) -> TokenInfo:
        """For ids [batch, seq]. They start their rows, unless `index` says otherwise."""
        if index is None:
            index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        return cls(index, index if positions is None else positions, segment_ids, valid)
