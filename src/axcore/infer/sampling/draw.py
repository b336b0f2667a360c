"""Choosing the next token of each row from its logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from axcore.config import ConfigError
from axcore.infer.sampling.counts import Counts
from axcore.infer.sampling.rows import SamplingRows
from axcore.infer.sampling.seeds import gumbel_noise
from axcore.infer.sampling.truncation import exact_sum, kept_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogProbs:
    """Natural log-probabilities.

    Attributes:
        token: that of the sampled token.
        rank: the number of tokens before the sampled one, in the order of decreasing probability and increasing id.
        top_ids: the most likely tokens in this order.
        top: their log-probabilities; -inf for tokens that are excluded.
    """

    token: Float32[Array, " rows"]
    rank: Int32[Array, " rows"]
    top_ids: Int32[Array, "rows top"]
    top: Float32[Array, "rows top"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """The sampled token of each row.

    Attributes:
        tokens: the tokens; -1 in a row that has none, because every token is excluded, or its largest logit is NaN or
            infinite.
        logprobs: None if `SamplingRows.num_logprobs` is None. In rows without a token, log-probabilities are -inf.
    """

    tokens: Int32[Array, " rows"]
    logprobs: LogProbs | None


def sample(
    logits: Float[Array, "rows vocab"],
    rows: SamplingRows,
    counts: Counts | None = None,
    *,
    uncounted: Int[Array, "rows tokens"] | None = None,
) -> Sampled:
    """Samples one token per row.

    The options apply in this order: penalties and bias, excluded tokens and grammar, temperature, min-p, top-k, top-p.
    A row of the result depends only on the same row of the arguments, bit by bit: not on other rows, their number, or
    how the vocabulary is sharded.

    Args:
        logits: float logits; columns from `rows.vocab_size` on are padding.
        rows: the options.
        counts: the tokens of each slot, for penalties; required by the method `full`.
        uncounted: output tokens of each row that `counts` lacks; negative: none.

    Raises:
        ConfigError: the shapes do not match, or `counts` is missing.
    """
    if logits.ndim != 2 or logits.shape[1] < rows.vocab_size or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ConfigError(
            f"logits must be floats [rows, vocab] with at least {rows.vocab_size} columns, got {logits.dtype} "
            f"{list(logits.shape)}"
        )
    real = jnp.arange(logits.shape[1]) < rows.vocab_size
    raw = jnp.where(real, logits.astype(jnp.float32), -jnp.inf)
    edited = _edited(raw, rows, counts, uncounted) if rows.method == "full" else raw
    best = jnp.max(edited, axis=-1)
    if rows.method == "greedy":
        tokens, processed = jnp.argmax(edited, axis=-1), edited
    else:
        tokens, processed = _drawn(edited, best, rows)
    valid = jnp.isfinite(best)
    tokens = jnp.where(valid, tokens, -1).astype(jnp.int32)
    if rows.num_logprobs is None:
        return Sampled(tokens, None)
    described = processed if rows.processed else raw
    return Sampled(tokens, log_probabilities(described, tokens, valid, rows.num_logprobs))


def _edited(
    logits: Float32[Array, "rows vocab"],
    rows: SamplingRows,
    counts: Counts | None,
    uncounted: Int[Array, "rows tokens"] | None,
) -> Float32[Array, "rows vocab"]:
    """The logits after penalties, bias and masks."""
    if rows.ints is None or rows.floats is None or rows.edit_ids is None:
        raise ConfigError("SamplingRows of the method 'full' lack arrays. Create them with SamplingRows.of")
    if counts is None or counts.output.shape[1] != logits.shape[1]:
        given = "None" if counts is None else f"one of {counts.output.shape[1]} tokens"
        raise ConfigError(f"counts must be Counts of {logits.shape[1]} tokens for the method 'full', not {given}")
    slots, floats = rows.ints[:, 3], jnp.asarray(rows.floats)
    frequency, presence, repetition = (floats[:, column, None] for column in (3, 4, 5))
    output = counts.output.at[slots].get(mode="fill", fill_value=0)
    if uncounted is not None:
        each = jnp.arange(logits.shape[0])[:, None]
        output = output.at[each, jnp.where(uncounted < 0, logits.shape[1], uncounted)].add(1, mode="drop")
    seen = counts.prompt.at[slots].get(mode="fill", fill_value=False) | (output > 0)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    logits = logits - jnp.where(output > 0, frequency * output + presence, 0)
    # JAX drops ids of columns that do not exist. Edits of padding have no effect, since it is -inf.
    at = jnp.arange(logits.shape[0])[:, None], rows.edit_ids
    logits = logits.at[at].add(rows.edits, mode="drop")
    if rows.grammar is None:
        return logits
    ids = jnp.arange(logits.shape[1])
    words = jnp.asarray(rows.grammar)[:, jnp.minimum(ids // 32, rows.grammar.shape[1] - 1)]
    return jnp.where((words >> (ids % 32)) & 1, logits, -jnp.inf)


def _drawn(
    logits: Float32[Array, "rows vocab"], best: Float32[Array, " rows"], rows: SamplingRows
) -> tuple[Int32[Array, " rows"], Float32[Array, "rows vocab"]]:
    """The sampled tokens, and the logits of the distribution that they are from."""
    if rows.ints is None or rows.floats is None:
        raise ConfigError(f"SamplingRows of the method {rows.method!r} lack arrays. Create them with SamplingRows.of")
    ints, floats = jnp.asarray(rows.ints), jnp.asarray(rows.floats)
    seeds, positions, top_k = ints[:, :2], ints[:, 2], ints[:, 4]
    temperature, top_p, log_min_p = (floats[:, column] for column in range(3))
    greedy = (temperature == 0)[:, None]
    base = jnp.where(jnp.isfinite(best), best, 0)[:, None]
    scaled = (logits - base) / jnp.where(greedy, 1, temperature[:, None])
    if rows.method == "full":
        kept = kept_tokens(scaled, top_k=top_k, top_p=top_p, log_min_p=log_min_p)
        scaled = jnp.where(kept, scaled, -jnp.inf)
    processed = jnp.where(greedy, logits, scaled)
    words = jax.lax.bitcast_convert_type(seeds, jnp.uint32)
    noise = gumbel_noise(words, positions, logits.shape[1])
    return jnp.argmax(jnp.where(greedy, logits, scaled + noise), axis=-1), processed


def log_probabilities(
    logits: Float32[Array, "rows vocab"], tokens: Int32[Array, " rows"], valid: Bool[Array, " rows"], num_top: int
) -> LogProbs:
    """The log-probabilities of softmax(logits).

    Args:
        logits: -inf excludes a token.
        tokens: the token of each row whose log-probability is returned.
        valid: false in rows whose logits are undefined.
        num_top: the number of most likely tokens to return.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - jnp.where(jnp.isfinite(best), best, 0)
    log_sum = jnp.log(exact_sum(jnp.exp(shifted)))
    ids = jnp.arange(logits.shape[1])
    chosen = jnp.max(jnp.where(ids == tokens[:, None], shifted, -jnp.inf), axis=-1, keepdims=True)
    before = (shifted > chosen) | ((shifted == chosen) & (ids < tokens[:, None]))
    top, top_ids = jax.lax.top_k(shifted, num_top)
    return LogProbs(
        token=jnp.where(valid, chosen[:, 0] - log_sum, -jnp.inf),
        rank=jnp.sum(before, axis=-1, dtype=jnp.int32),
        top_ids=top_ids,
        top=jnp.where(valid[:, None], top - log_sum[:, None], -jnp.inf),
    )
