"""The tokens of steps as a model sees them, with the cached tokens of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from axcore.config import ConfigError
from axcore.infer.decoding.step import Step
from axcore.nn import ADAPTERS, CachedBlocks, CachedRows, PerToken, TokenInfo

if TYPE_CHECKING:
    from axcore.infer.decoding.decoder import Decoder


class Block(NamedTuple):
    """A step as the model sees it.

    Attributes:
        step: the step.
        tokens: its tokens [batch, width], with the cached tokens of their rows.
        at: the tokens whose logits are computed.
        defined: which of these logits are defined.
    """

    step: Step
    tokens: TokenInfo
    at: Int[Array, "batch logits"]
    defined: Bool[Array, "batch logits"]


def block_of(step: Step, held: Int[Array, " slots"], decoder: Decoder) -> tuple[Block, Int[Array, " slots"]]:
    """The block of a step, and the length of each slot after it.

    Args:
        step: the step.
        held: the length of each slot before it.
        decoder: the slots and pages.

    Raises:
        ConfigError: the page tables do not fit the decoder; see `Decoder.__call__`.
    """
    table = _page_table(step, decoder)
    width, is_shared = step.ids.shape[1], decoder.shares_prefixes and step.pages is not None
    start = step.start.astype(jnp.int32)
    given = jnp.full(start.shape, width, jnp.int32) if step.lengths is None else step.lengths.astype(jnp.int32)
    counts, slots = jnp.clip(given, 0, width), None
    is_valid = (start >= 0) & (counts == given)
    if step.slots is not None:
        slots = step.slots.astype(jnp.int32)
        is_valid &= (slots >= 0) & (slots < decoder.batch_size)
        if not is_shared:
            is_valid &= (slots[:, None] == slots).sum(axis=1) == 1
        slots = jnp.where(is_valid, slots, decoder.batch_size)  # out of range, so writes are dropped
    before = held if slots is None else held[slots]
    if not is_shared:
        is_valid &= start <= before
    end, limit = start + counts, decoder.max_len
    if decoder.paging is not None and table is not None:
        limit = min(limit, table.shape[1] * decoder.paging.page_size)
        is_valid &= decoder.paging.complete(table, end)
        table = jnp.where(is_valid[:, None], table, decoder.paging.num_pages)  # out of range, so writes are dropped
    for bound in decoder.recompute_above:
        is_valid &= (start == 0) | ((before > bound) == (end > bound))
    index = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    places = jnp.arange(decoder.max_len, dtype=jnp.int32)[None]
    rows = CachedRows(
        tokens=TokenInfo(places, places, valid=places < end[:, None], valid_first=True),
        lengths=end,
        slots=slots,
        pages=table,
        phase=step.phase or ("decode" if width == 1 else "prefill"),
    )
    # Padding has the position of the last token, so that it does not lengthen the row for position embeddings.
    positions = jnp.minimum(index, jnp.maximum(end - 1, 0)[:, None])
    valid = None if step.lengths is None else jnp.arange(width) < counts[:, None]
    every = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), step.ids.shape)
    at = every if step.logits_at is None else step.logits_at
    asked = start[:, None] + at
    defined = is_valid[:, None] & (at >= 0) & (at < counts[:, None]) & (asked >= 0) & (asked < limit)
    # The tokens of an invalid row may have overwritten cached ones.
    end = jnp.where(is_valid, jnp.minimum(end, limit), jnp.clip(start, 0, before))
    if slots is None:
        held = end
    elif is_shared:  # the last of several rows of a slot counts
        held = held.at[slots].set(0, mode="drop").at[slots].max(end, mode="drop")
    else:
        held = held.at[slots].set(end, mode="drop")
    return Block(step, TokenInfo(index, positions, valid=valid, cached=rows), at, defined), held


def _page_table(step: Step, decoder: Decoder) -> Int[Array, "batch pages_per_row"] | None:
    """The page table of each row; None without paged caches."""
    paging, table = decoder.paging, step.pages
    if paging is None:
        if table is not None:
            raise ConfigError(
                "Step.pages is given, but the model has no paged caches; leave it out, or pass a paged cache to "
                "Decoder.of"
            )
        return None
    if table is None:
        required = decoder.batch_size * paging.pages_for(decoder.max_len)
        if paging.num_pages < required:
            raise ConfigError(
                f"Step.pages is None, which requires {required} pages for {decoder.batch_size} rows of "
                f"{decoder.max_len} tokens, but the pool has num_pages={paging.num_pages}. Pass page tables, or "
                f"increase num_pages"
            )
        slots = jnp.arange(step.ids.shape[0]) if step.slots is None else step.slots
        return paging.own_pages(slots.astype(jnp.int32), decoder.max_len)
    lengths = step.ids.shape[1] if step.lengths is None else step.lengths
    if not any(isinstance(each, jax.core.Tracer) for each in (table, step.start, lengths)):
        paging.check(table, step.start, np.broadcast_to(lengths, step.start.shape))
    return table.astype(jnp.int32)


def model_inputs(blocks: Sequence[Block]) -> tuple[Int[Array, "rows tokens"], dict[str, Any]]:
    """The token ids and the keyword arguments of one call of the model (Any: as in `Functional`). The tokens of several
    blocks follow each other in one row."""
    steps = [block.step for block in blocks]
    adapters = _adapters_of_tokens(steps)
    if len(blocks) == 1:
        tokens = blocks[0].tokens
        return steps[0].ids, {
            "positions": tokens.positions,
            "index": tokens.index,
            "valid": tokens.valid,
            "cached": tokens.cached,
            "logits_at": steps[0].logits_at,
            "shared": None if adapters is None else {ADAPTERS: PerToken(adapters[0])},
        }

    def flat(arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate([array.reshape(1, -1) for array in arrays], axis=1)

    starts = np.cumsum([0, *(step.ids.size for step in steps)])
    places = []
    for block, first in zip(blocks, starts[:-1], strict=True):
        rows, width = block.tokens.index.shape
        within = jnp.clip(block.at, 0, width - 1)
        places.append(first + width * jnp.arange(rows, dtype=jnp.int32)[:, None] + within)
    each_of = [block.tokens for block in blocks]
    valid = [jnp.full(each.index.shape, True) if each.valid is None else each.valid for each in each_of]
    return flat([step.ids for step in steps]), {
        "positions": flat([each.positions for each in each_of]),
        "index": flat([each.index for each in each_of]),
        "valid": flat(valid),
        "cached": CachedBlocks(tuple(each_of)),
        "logits_at": flat(places),
        "shared": None if adapters is None else {ADAPTERS: PerToken(flat(adapters))},
    }


def logits_of_blocks(
    logits: Float[Array, "rows logits vocab"], blocks: Sequence[Block]
) -> list[Float[Array, "batch logits vocab"]]:
    """The logits of each block, from those of the model. Undefined ones are NaN."""
    if len(blocks) == 1:
        found = [logits]
    else:
        cuts = np.cumsum([block.at.size for block in blocks])[:-1]
        parts = zip(jnp.split(logits[0], cuts), blocks, strict=True)
        found = [part.reshape(*block.at.shape, -1) for part, block in parts]
    return [jnp.where(block.defined[..., None], each, jnp.nan) for block, each in zip(blocks, found, strict=True)]


def _adapters_of_tokens(steps: Sequence[Step]) -> list[Int[Array, "batch width"]] | None:
    """The slot of the adapter of each token of some steps; None: no step has adapters."""
    if all(step.adapters is None for step in steps):
        return None
    of_rows = [jnp.int32(-1) if step.adapters is None else step.adapters.astype(jnp.int32)[:, None] for step in steps]
    return [jnp.broadcast_to(each, step.ids.shape) for each, step in zip(of_rows, steps, strict=True)]
