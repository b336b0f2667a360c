"""Top-k, top-p and min-p without sorting.

Each option keeps a prefix of the tokens in the order of decreasing logit and, for equal logits, increasing id. A binary
search over bit patterns of floats finds the end of the prefix. It only counts tokens and adds integers, so the result
depends neither on the order of additions, nor on the number of rows, nor on how the vocabulary is sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

SEARCH_BITS = 2
"""Bits that each pass of a search over the vocabulary determines: 1, 2 or 4. A pass compares each token with
`2**SEARCH_BITS - 1` thresholds."""


def kept_tokens(
    z: Float32[Array, "rows vocab"],
    *,
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
    log_min_p: Float32[Array, " rows"],
) -> Bool[Array, "rows vocab"]:
    """The tokens that remain after min-p, top-k and top-p, at least one in each row.

    Top-p refers to the probabilities after min-p and top-k. Equal logits are kept in the order of their ids, so top-k
    keeps exactly k tokens unless fewer are left.

    Args:
        z: logits minus their maximum, divided by the temperature. -inf excludes a token.
        top_k: at least 1; the size of the vocabulary or more keeps all tokens.
        top_p: in [0, 1]; 1 keeps all tokens.
        log_min_p: log(min_p); -inf keeps all tokens.
    """
    # The order of non-negative floats is the order of their bit patterns. The smallest distance is the best token.
    distance = jax.lax.bitcast_convert_type(jnp.abs(z), jnp.uint32)
    possible = z > -jnp.inf
    one, none = jnp.ones_like(distance), jnp.zeros_like(distance)

    def total(weights: jax.Array, within: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(within, weights, none), axis=-1, dtype=jnp.uint32)

    # The prefix: all tokens with a distance below `last`, and the first `ties` of those at `last`.
    count = jnp.where(possible, one, none)
    k = jnp.clip(top_k.astype(jnp.uint32), 1, total(count, possible))
    last = smallest(lambda limit: total(count, distance <= limit[:, None]), k, 32)
    ties = k - total(count, distance < last[:, None])
    nearest = jax.lax.bitcast_convert_type(jnp.abs(log_min_p), jnp.uint32)
    ties = jnp.where(nearest < last, jnp.uint32(z.shape[-1]), ties)
    last = jnp.minimum(last, nearest)

    # Probabilities of the prefix as multiples of 2**-31, approximately.
    within = possible & (distance <= last[:, None])
    weights = jnp.where(within, jnp.exp(z), 0)
    units = jnp.round(weights * (2.0**31 / exact_sum(weights))[:, None]).astype(jnp.uint32)
    before, tied, unit = _around(distance, units, within, last)
    ties = jnp.minimum(ties, tied)
    # The tolerance is larger than the rounding error of top_p and of the product.
    mass = before + ties * unit
    goal = jnp.maximum((mass.astype(jnp.float32) * top_p * (1 - 2.0**-22)).astype(jnp.uint32), 1)
    end = smallest(lambda limit: total(units, distance <= limit[:, None]), goal, 32)
    before, _, unit = _around(distance, units, within, end)
    needed = (goal - before + unit - 1) // jnp.maximum(unit, 1)
    last, ties = jnp.where(top_p < 1, end, last), jnp.where(top_p < 1, needed, ties)

    ids = jax.lax.broadcasted_iota(jnp.uint32, z.shape, 1)
    at_last = possible & (distance == last[:, None])
    last_id = smallest(lambda limit: total(one, at_last & (ids <= limit[:, None])), ties, z.shape[-1].bit_length())
    return possible & ((distance < last[:, None]) | (at_last & (ids <= last_id[:, None])))


def _around(
    distance: UInt32[Array, "rows vocab"],
    units: UInt32[Array, "rows vocab"],
    within: Bool[Array, "rows vocab"],
    limit: UInt32[Array, " rows"],
) -> tuple[UInt32[Array, " rows"], UInt32[Array, " rows"], UInt32[Array, " rows"]]:
    """The sum of units of tokens below a distance, the number of tokens at it, and the unit of each of those."""
    at = within & (distance == limit[:, None])
    below = jnp.where(within & (distance < limit[:, None]), units, 0)
    return (
        jnp.sum(below, axis=-1, dtype=jnp.uint32),
        jnp.sum(at, axis=-1, dtype=jnp.uint32),
        jnp.max(jnp.where(at, units, 0), axis=-1),
    )


def smallest(
    measure: Callable[[UInt32[Array, " rows"]], UInt32[Array, " rows"]], goal: UInt32[Array, " rows"], num_bits: int
) -> UInt32[Array, " rows"]:
    """The smallest number of `num_bits` bits for which `measure`, which never decreases, is at least `goal`.

    Returns the largest number if there is none.
    """
    passes = -(-num_bits // SEARCH_BITS)

    def step(index: jax.Array, low: jax.Array) -> jax.Array:
        shift = ((passes - 1 - index) * SEARCH_BITS).astype(jnp.uint32)
        parts = [low + (jnp.uint32(part) << shift) - 1 for part in range(1, 1 << SEARCH_BITS)]
        missed = sum((measure(part) < goal).astype(jnp.uint32) for part in parts)
        return low + (jnp.asarray(missed, jnp.uint32) << shift)

    return jax.lax.fori_loop(0, passes, step, jnp.zeros_like(goal))


def exact_sum(weights: Float32[Array, "rows vocab"]) -> Float32[Array, " rows"]:
    """The sum of numbers in [0, 1], in an order of additions that has no effect on the result.

    Numbers are split into three integers of 13 bits, whose sums are exact for fewer than 2**19 tokens. Each number is
    rounded down to a multiple of 2**-39.
    """
    total, rest = jnp.zeros(weights.shape[:1], jnp.float32), weights
    sums = []
    for _ in range(3):
        rest = rest * 2.0**13
        digit = jnp.floor(rest)
        sums.append(jnp.sum(digit.astype(jnp.uint32), axis=-1, dtype=jnp.uint32))
        rest = rest - digit
    for power, digits in reversed(list(enumerate(sums, 1))):
        total = total + digits.astype(jnp.float32) * 2.0 ** (-13 * power)
    return total
