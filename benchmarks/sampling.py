"""Time of sampling one token per row on one device, and of the same options with a full sort.

Prints a JSON object per vocabulary size, with the median milliseconds of `greedy`, `plain` (temperature), `full` (every
option, also with log-probabilities and a grammar), `full_search_1`, `_2` and `_4` (bits that a pass of the search
determines), `sort` (temperature, min-p, top-k and top-p with a full sort), and the share of rows in which `full` and
`sort` keep the same tokens. Each call runs `--calls` steps in one program, so that launches from the host do not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.infer.requests import SamplingOptions
from axcore.infer.sampling import Counts, NextToken, SamplingRows, sample, seed_words, truncation

GREEDY, PLAIN = SamplingOptions(temperature=0.0), SamplingOptions(temperature=0.8)
FULL = SamplingOptions(temperature=0.8, top_k=100, top_p=0.9, min_p=0.001, frequency_penalty=0.1, presence_penalty=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    for vocab in given.vocab:
        device = {"card": jax.devices()[0].device_kind, "jax": jax.__version__}
        print(json.dumps({"rows": given.rows, "vocab": vocab} | measured(given, vocab) | device), flush=True)


def measured(given: argparse.Namespace, vocab: int) -> dict[str, Any]:
    logits = 3 * jax.random.normal(jax.random.key(0), (given.rows, vocab), jnp.float32)
    counts = Counts.zeros(given.rows, vocab)

    def packed(options: SamplingOptions, grammar: bool = False, **changed: Any) -> SamplingRows:
        mask = np.full(-(-vocab // 32), -1, np.int32) if grammar else None
        tokens = [NextToken(options, seed_words(row), 100, 9, row, mask) for row in range(given.rows)]
        return SamplingRows.of(tokens, vocab_size=vocab, **changed)

    def ours(options: SamplingOptions, **changed: Any) -> float:
        return milliseconds(
            lambda x, rows, counts: sample(x, rows, counts).tokens, logits, packed(options, **changed), counts
        )

    def milliseconds(fn: Callable[..., jax.Array], *args: Any) -> float:
        return median(fn, args, given.calls, given.rounds)

    figures = {"greedy": ours(GREEDY), "plain": ours(PLAIN), "full": ours(FULL)}
    every = SamplingOptions(**{name: getattr(FULL, name) for name in ("temperature", "top_k", "top_p")}, logprobs=20)
    figures["full_grammar_logprobs"] = ours(every, grammar=True)
    default = truncation.SEARCH_BITS
    for bits in (1, 2, 4):
        truncation.SEARCH_BITS = bits
        figures[f"full_search_{bits}"] = ours(FULL)
    truncation.SEARCH_BITS = default
    keys = jax.vmap(jax.random.key)(jnp.arange(given.rows))
    figures["sort"] = milliseconds(sorted_sample, logits, keys)
    shifted = (logits - logits.max(axis=-1, keepdims=True)) / FULL.temperature
    same = (jnp.isfinite(truncated_by_sort(logits)) == kept(shifted)).all(axis=-1)
    return {name: round(value, 4) for name, value in figures.items()} | {"same_tokens": float(same.mean())}


def median(fn: Callable[..., jax.Array], args: tuple[Any, ...], calls: int, rounds: int) -> float:
    """Milliseconds of one of `calls` calls in a loop. The argument of each depends on the result of the one before."""

    def loop(x: jax.Array, *rest: Any) -> jax.Array:
        def step(_: jax.Array, last: jax.Array) -> jax.Array:
            # Adds 0 or 1 to a logit of each row, which no call can know in advance.
            return fn(x.at[:, 0].add((last > 0).astype(x.dtype)), *rest)

        return jax.lax.fori_loop(0, calls, step, jnp.zeros(x.shape[:1], jnp.int32))

    compiled = jax.jit(loop).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(1e3 * (time.perf_counter() - began) / calls)
    return float(np.median(times))


def truncated_by_sort(logits: jax.Array) -> jax.Array:
    """The logits at the temperature of `FULL`, with -inf for tokens that its options exclude, by a sort of each row."""
    z = (logits - logits.max(axis=-1, keepdims=True)) / FULL.temperature
    order = jnp.argsort(-z, axis=-1, stable=True)
    ranked = jnp.take_along_axis(z, order, axis=-1)
    keep = (ranked >= np.log(FULL.min_p)) & (jnp.arange(z.shape[1]) < FULL.top_k)
    chances = jnp.where(keep, jnp.exp(ranked), 0)
    chances = chances / chances.sum(axis=-1, keepdims=True)
    keep &= jnp.cumsum(chances, axis=-1) - chances < FULL.top_p
    back = jnp.zeros_like(keep).at[jnp.arange(z.shape[0])[:, None], order].set(keep)
    return jnp.where(back, z, -jnp.inf)


def sorted_sample(logits: jax.Array, keys: jax.Array) -> jax.Array:
    return jax.vmap(jax.random.categorical)(keys, truncated_by_sort(logits)).astype(jnp.int32)


def kept(z: jax.Array) -> jax.Array:
    """The tokens that the options of `FULL` keep."""
    each = jnp.ones(z.shape[:1])
    return truncation.kept_tokens(
        z, top_k=(FULL.top_k * each).astype(jnp.int32), top_p=FULL.top_p * each, log_min_p=np.log(FULL.min_p) * each
    )


if __name__ == "__main__":
    main()
