"""Speculative decoding: which drafts the model would have sampled itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from axcore.infer.sampling.counts import Counts
from axcore.infer.sampling.draw import Sampled, sample
from axcore.infer.sampling.rows import SamplingRows

NO_DRAFT = -1
"""In place of a draft: no token."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """The tokens that rows with drafts sample.

    Attributes:
        sampled: the token after the last one of each row and after each of its drafts, one row after another.
        num_tokens: the number of tokens that each row gets: the accepted drafts and the token after them. 0 if no token
            can be sampled.
    """

    sampled: Sampled
    num_tokens: Int32[Array, " rows"]


def verify(
    logits: Float[Array, "rows width vocab"],
    drafts: Int[Array, "rows drafts"],
    rows: SamplingRows,
    counts: Counts | None = None,
) -> Verified:
    """Samples the token after each token of a row, and accepts drafts as long as they are the sampled tokens.

    A draft is accepted if it is the token that the model samples at its position. The random numbers of a token depend
    only on the seed and the position, so every row gets the tokens that it would get without drafts, whatever they are.

    Args:
        logits: the logits after the last token of each row and after each draft; `width` is one more than `drafts`.
        drafts: the drafts of each row, padded at the end with `NO_DRAFT`.
        rows: the options of each of the `rows * width` tokens; `PADDING` after the last draft of a row.
        counts: the tokens of each slot, without drafts; required by the method `full`.

    Raises:
        ConfigError: see `sample`.
    """
    num_rows, width, vocab = logits.shape
    at = jnp.arange(width)
    # The drafts before each token, which penalties count: its sample matters only if all of them are accepted.
    before = jnp.where(at[:-1] < at[:, None], drafts[:, None, :], NO_DRAFT).reshape(num_rows * width, width - 1)
    sampled = sample(logits.reshape(num_rows * width, vocab), rows, counts, uncounted=before)
    tokens = sampled.tokens.reshape(num_rows, width)
    is_accepted = (tokens[:, :-1] == drafts) & (drafts >= 0)
    num_accepted = jnp.cumprod(is_accepted, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    after = jnp.take_along_axis(tokens, num_accepted[:, None], axis=1)[:, 0]
    return Verified(sampled, num_accepted + (after >= 0))
