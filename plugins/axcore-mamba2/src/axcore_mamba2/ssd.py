"""State space duality: the recurrence of Mamba-2, computed by matrix products over chunks.

Source: Dao and Gu 2024, arXiv 2405.21060, section 6.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.checkpoint, static_argnums=(5,))
def ssd(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    chunk: int,
    state: jax.Array | None = None,
    documents: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs `h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T`, `y_t = h_t C_t` for every head.

    Tokens of a chunk interact directly, as in attention. Chunks interact through their states. The time is linear in
    seq. Only the arguments are saved for the backward pass, which recomputes the weights between tokens.

    Args:
        x: [batch, seq, head, head_dim]. Matrix products are in its dtype, with float32 sums.
        dt: float32 [batch, seq, head], the step sizes. A token with step size 0 does not change the state.
        A: float32 [head], negative.
        B, C: [batch, seq, group, state_dim] in the dtype of x; each group serves `head / group` consecutive heads.
        chunk: largest number of tokens per chunk.
        state: float32 [batch, head, head_dim, state_dim], the initial state; None for zeros.
        documents: int32 [batch, seq], non-decreasing. The state is reset between different numbers; the initial state
            belongs to number 0. None means number 0 for all tokens.

    Returns:
        y, float32 [batch, seq, head, head_dim], and the state after the last token.
    """
    batch, seq, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[2:]
    if seq == 1 and documents is None:
        return _one_token(x, dt, A, B, C, state)
    num_chunks = -(-seq // chunk)
    chunk = -(-seq // num_chunks)  # chunks as equal as possible

    def split(array: jax.Array) -> jax.Array:
        """[batch, seq, ...] -> [batch, num_chunks, chunk, ...]. Padding at the end has dt = 0."""
        padding = [(0, 0), (0, num_chunks * chunk - seq), *[(0, 0)] * (array.ndim - 2)]
        return jnp.pad(array, padding).reshape(batch, num_chunks, chunk, *array.shape[2:])

    # Dimensions: b batch, c chunk, i and j tokens of a chunk, g group, r head of a group, p head_dim, n state_dim.
    per_group = (batch, seq, num_groups, num_heads // num_groups)
    inputs = split((x * dt[..., None]).astype(x.dtype).reshape(*per_group, head_dim))
    decay = _running_sum(split((dt * A).reshape(per_group)))  # log decay since the start of the chunk
    B, C = split(B), split(C)
    linked, to_end, from_start, through = _links(documents, num_chunks, chunk)

    # Interactions within a chunk. Masked before the exponential, which would overflow above the diagonal.
    by_head = tuple(jnp.moveaxis(part, 2, -1) for part in decay)
    between = sum(part[..., :, None] - part[..., None, :] for part in by_head)
    between = jnp.where(linked[:, :, None, None], between, -jnp.inf)
    scores = _product("bcign,bcjgn->bcgij", C, B)
    weights = (scores[:, :, :, None] * jnp.exp(between)).astype(x.dtype)
    y = _product("bcgrij,bcjgrp->bcigrp", weights, inputs)

    # The contribution of each chunk to the state, and the decay of the state across it.
    remaining = sum(part[:, :, -1:] - part for part in decay)
    remaining = jnp.where(to_end[..., None, None], jnp.exp(remaining), 0.0)
    added = _product("bcjgn,bcjgrp->cbgrpn", B, (inputs * remaining[..., None]).astype(x.dtype))
    since_start = jnp.exp(sum(decay))
    kept = jnp.moveaxis(jnp.where(through[..., None, None], since_start[:, :, -1], 0.0), 1, 0)

    def pass_chunk(state: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        kept, added = chunk
        return kept[..., None, None] * state + added, state

    first = jnp.zeros(added.shape[1:], jnp.float32) if state is None else state.reshape(added.shape[1:])
    after, before = jax.lax.scan(pass_chunk, first, (kept, added))

    # The contribution of the state before the chunk to each token.
    seen = jnp.where(from_start[..., None, None], since_start, 0.0)
    y += _product("bcign,cbgrpn->bcigrp", C, before.astype(x.dtype)) * seen[..., None]
    y = y.reshape(batch, num_chunks * chunk, num_heads, head_dim)[:, :seq]
    return y, after.reshape(batch, num_heads, head_dim, state_dim)


def _one_token(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, state: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`ssd` of one token per row, in float32. Without matrix products, XLA reads the state where it is."""
    batch, _, num_heads, head_dim = x.shape
    groups, state_dim = B.shape[2:]
    per_group = (batch, groups, num_heads // groups)
    inputs = (x * dt[..., None]).astype(jnp.float32).reshape(*per_group, head_dim, 1)
    B, C = (each.astype(jnp.float32).reshape(batch, groups, 1, 1, state_dim) for each in (B, C))
    after = inputs * B
    if state is not None:
        after += jnp.exp(dt * A).reshape(*per_group, 1, 1) * state.reshape(*per_group, head_dim, state_dim)
    y = (after * C).sum(axis=-1)
    return y.reshape(batch, 1, num_heads, head_dim), after.reshape(batch, num_heads, head_dim, state_dim)


LEAST = -104.0
"""The exponential of this and of smaller values is 0 in float32."""


def _running_sum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Running sums along dimension 2, in two parts whose differences have float32 accuracy.

    A difference of plain float32 sums has a rounding error relative to the sums: after a hundred tokens that each decay
    by exp(-100), the decay between the next two would be wrong by 1e-3. Therefore multiples of a power of two, whose
    sums are exact, are summed separately from the small remainder.

    Args:
        x: float32, not positive. Values below `LEAST` count as `LEAST`.
    """
    x = jnp.maximum(x, LEAST)
    grain = 2.0 ** (math.ceil(math.log2(-LEAST * x.shape[2])) - 24)  # float32 holds integers up to 2**24
    coarse = jnp.round(x / grain) * grain  # has no gradient; the gradient of x flows through the remainder
    return jnp.cumsum(coarse, axis=2), jnp.cumsum(x - coarse, axis=2)


def _links(documents: jax.Array | None, num_chunks: int, chunk: int) -> tuple[jax.Array, ...]:
    """Where the state is passed on, as bool.

    Returns:
        from token j to token i of a chunk [batch, num_chunks, i, j]; from j to the chunk's end [batch, num_chunks, j];
        from the chunk's start to i [batch, num_chunks, i]; across the chunk [batch, num_chunks]. Without documents,
        batch and num_chunks are 1.
    """
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))[None, None]
    if documents is None:
        return causal, *(jnp.ones((1,) * rank, bool) for rank in (3, 3, 2))
    batch, seq = documents.shape
    numbers = jnp.pad(documents, ((0, 0), (0, num_chunks * chunk - seq)), mode="edge").reshape(batch, num_chunks, chunk)
    last = numbers[:, :, -1]
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)))  # the initial state belongs to number 0
    linked = causal & (numbers[..., :, None] == numbers[..., None, :])
    return linked, numbers == last[..., None], numbers == before[..., None], last == before
