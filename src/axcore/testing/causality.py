"""Checks of a whole language model: causality, packed documents, and decoding with a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from axcore.config import Config
from axcore.infer import Decoder, Step
from axcore.module import Functional, Rngs, Tree, functional
from axcore.nn import ContiguousCache

TOLERANCE = 1e-4
"""Largest relative and absolute difference of float32 logits of order 1 that are computed in two ways."""
Ids = Int[Array, "batch seq"]
Logits = Float[np.ndarray, "batch seq vocab"]


@functools.cache  # several checks use the same model
def disturbed(cfg: Config) -> tuple[Functional, Tree, Tree]:
    """A built model with noise on its parameters, since parameters that are 0 or 1 would hide mistakes."""
    fn, params, state = functional(cfg.build(rngs=Rngs(0)))
    return fn, with_noise(params), state


def with_noise(params: Tree) -> Tree:
    """Adds normal noise with a standard deviation of 0.1 to every float parameter."""
    random = np.random.default_rng(0)

    def noisy(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf + jnp.asarray(0.1 * random.normal(size=leaf.shape), leaf.dtype)

    noisy_params: Tree = jax.tree.map(noisy, params)
    return noisy_params


@functools.cache
def forward(cfg: Config) -> Callable[..., Logits]:
    """The compiled function from `(ids, positions, segment_ids)` to logits, for a model with noise on its
    parameters."""
    fn, params, state = disturbed(cfg)

    @jax.jit
    def call(params: Tree, ids: Ids, positions: Ids | None, segment_ids: Ids | None) -> jax.Array:
        logits: jax.Array = fn(params, state, ids, positions, segment_ids, key=jax.random.key(2))[0][0]
        return logits

    return lambda ids, positions=None, segment_ids=None: np.asarray(call(params, ids, positions, segment_ids))


def check_causality(cfg: Config, ids: Ids, vocab_size: int) -> None:
    """Checks that the logits of each token do not depend on later tokens."""
    logits = forward(cfg)(ids)
    for number in range(1, ids.shape[1]):
        changed = ids.at[:, number:].set((ids[:, number:] + 1) % vocab_size)
        found = forward(cfg)(changed)[:, :number]
        _close(found, logits[:, :number], f"changing the tokens from {number} on changes the logits before them")


def check_documents(cfg: Config, ids: Ids, length: int) -> None:
    """Checks that the logits of a packed document do not depend on the other document of its row.

    Args:
        cfg: the config of the model.
        ids: rows of two documents.
        length: the length of the first document.
    """
    first, second = ids[:, :length], ids[:, length:]

    def packed(*documents: Ids) -> Logits:
        sizes = [each.shape[1] for each in documents]
        positions = np.concatenate([np.arange(size) for size in sizes])
        segments = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        rows = [jnp.tile(jnp.asarray(each, jnp.int32), (len(ids), 1)) for each in (positions, segments)]
        return forward(cfg)(jnp.concatenate(documents, axis=1), *rows)

    found, swapped = packed(first, second), packed(second, first)
    own = swapped[:, : second.shape[1]]
    _close(found[:, length:], own, "the logits of a document depend on the document before it in a packed row")
    alone = forward(cfg)(jnp.concatenate([second, first], axis=1))[:, : second.shape[1]]
    _close(own, alone, "the logits of the first document of a packed row differ from those of a row without documents")


def check_decoding(cfg: Config, ids: Ids) -> None:
    """Checks that decoding with a KV cache gives the logits of one call for the whole row."""
    fn, params, state = disturbed(cfg)
    batch, length = ids.shape
    decoder, params, start = Decoder.of(
        fn.bind(params, state), cache=ContiguousCache.Config(), batch_size=batch, max_len=length
    )
    step, half, expected = jax.jit(decoder.__call__), length // 2, forward(cfg)(ids)
    for sizes in ((half, length - half), (half, *[1] * (length - half))):
        begin, decoding = 0, start
        for size in sizes:
            tokens = Step(ids[:, begin : begin + size], jnp.full((batch,), begin, jnp.int32))
            logits, decoding = step(params, decoding, tokens)
            message = (
                f"decoding in steps of {sizes} tokens differs from one call at tokens {begin} to {begin + size - 1}"
            )
            _close(np.asarray(logits), expected[:, begin : begin + size], message)
            begin += size


def _close(found: Logits, expected: Logits, message: str) -> None:
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=message)
