"""Seeds of requests, and random numbers that depend only on a seed, a position and a token id."""

from __future__ import annotations

import hashlib
import secrets

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

type Seed = tuple[int, int]
"""The two 32-bit words of a seed; see `seed_words`."""


def seed_words(seed: int | None, sample: int = 0) -> Seed:
    """The two 32-bit words of a seed.

    Args:
        seed: any integer; None: a random one. Choose it once, when a request is admitted, so that a request that is
            computed again gets the same tokens.
        sample: the index of the sample, for requests of several samples.
    """
    given = secrets.token_hex(16) if seed is None else str(seed)
    digest = hashlib.blake2b(f"{given}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def gumbel_noise(
    words: UInt32[Array, "rows 2"], positions: Int32[Array, " rows"], vocab_size: int
) -> Float32[Array, "rows vocab"]:
    """Independent Gumbel noise of each token.

    The noise of a row depends on its words, its position and the token id, not on the number of rows or tokens. The
    token with the largest sum of logit and noise has the distribution softmax(logits).
    """

    def bits(words: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
        return jax.random.bits(key, (vocab_size,), jnp.uint32)

    drawn = jax.vmap(bits)(words, positions).astype(jnp.float32)
    # The largest noise belongs to the smallest uniform numbers, where float32 has the highest resolution.
    uniform = jnp.minimum((drawn + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
