"""The exchange of halves that balances causal attention: device i of n gets the halves i and 2n - 1 - i of the row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def to_zigzag(arrays: PyTree, axes: tuple[str, ...], shards: int) -> PyTree:
    """Moves halves of arrays [batch, seq, ...], of which each device holds consecutive tokens, into the zig-zag
    order."""
    is_even = jax.lax.axis_index(axes) % 2 == 0

    def move(x: jax.Array) -> jax.Array:
        # Halves with an even number, which are the first of their device, and halves with an odd number.
        even, odd = (jax.lax.ppermute(half, axes, _moves(shards, n)) for n, half in enumerate(jnp.split(x, 2, axis=1)))
        return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1)

    return jax.tree.map(move, arrays)


def from_zigzag(arrays: PyTree, axes: tuple[str, ...], shards: int) -> PyTree:
    """The inverse of `to_zigzag`."""
    is_even = jax.lax.axis_index(axes) % 2 == 0

    def move(x: jax.Array) -> jax.Array:
        early, late = jnp.split(x, 2, axis=1)
        halves = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
        back = ([(target, source) for source, target in _moves(shards, number)] for number in range(2))
        return jnp.concatenate(
            [jax.lax.ppermute(half, axes, moves) for half, moves in zip(halves, back, strict=True)], axis=1
        )

    return jax.tree.map(move, arrays)


def _moves(shards: int, number: int) -> list[tuple[int, int]]:
    """(source, target) of the first (0) or second (1) half of each device."""
    halves = [2 * source + number for source in range(shards)]
    return [(source, min(half, 2 * shards - 1 - half)) for source, half in enumerate(halves)]
