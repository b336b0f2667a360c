"""Log-probabilities of an engine minus those of the training loss, by KV cache and dtype.

For each cache, an engine samples after `--prompts` random prompts and scores them. Every log-probability is compared
with that of the training loss on the whole row, in float32 and bfloat16. Without MODEL, the model is tiny and random,
and every cache that is installed is measured. With MODEL, a run folder or model folder, only the caches that `--cache`
names are. Prints a table, and a JSON object on the last line.
"""

from __future__ import annotations

import argparse
import json
from typing import cast

import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore.infer import Engine, SamplingOptions
from axcore.infer.loading import load_model
from axcore.infer.logprobs import logprob_errors
from axcore.module import Layer
from axcore.nn import KVCache, Normal
from axcore.plugin import KVCacheOffer
from axcore.plugin.features import offered
from axcore.testing import tiny_model

CACHES = {
    "contiguous": "contiguous",
    "contiguous, int8": "contiguous:dtype=int8",
    "contiguous, float8": "contiguous:dtype=float8_e4m3fn",
    "pages": "paged-kv:page_size=4",
    "pages, int8": "paged-kv:page_size=4,dtype=int8",
    "pages, float8": "paged-kv:page_size=4,dtype=float8_e4m3fn",
    "ring": "ring-kv:window=8",
    "ring, int8": "ring-kv:window=8,dtype=int8",
}


def built(dtype: str, window: bool) -> Layer:
    cfg = ax.select(tiny_model(), "embedding").set(init=Normal(stddev=1.0))
    features = (ax.use("sliding-window", size=8),) if window else ()
    model: Layer = (
        ax.pipe(cfg, ax.use("rope"), *features).set(dtypes=ax.DTypes(compute=jnp.dtype(dtype))).build(rngs=ax.Rngs(0))
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a run folder or a model folder (default: a tiny random model)")
    parser.add_argument("--cache", action="append", metavar="CACHE[:KEY=VALUE,...]", help="may be repeated")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=40, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=20, help="sampled tokens after each prompt")
    given = parser.parse_args()
    caches = CACHES if given.cache is None and given.model is None else {n: n for n in given.cache or ["contiguous"]}
    rows: dict[str, dict[str, float]] = {}
    print("| cache | dtype | tokens | mean error | mean absolute error | largest |\n|---|---|---:|---:|---:|---:|")
    for name, text in caches.items():
        for dtype in ("float32", "bfloat16"):
            if given.model is None:
                model = built(dtype, window=text.startswith("ring"))
            else:
                model = load_model(given.model, dtype=dtype, keep_caches=False).model
            cache = cast(KVCache.Config, offered(KVCacheOffer, text))
            size = given.length + given.tokens
            cfg = Engine.Config(cache=cache, max_len=size + 1, max_rows=2, step_tokens=max(16, given.length // 2))
            with cfg.build(model) as engine:
                random = np.random.default_rng(0)
                prompts = random.integers(0, engine.vocab_size, (given.prompts, given.length)).tolist()
                errors = logprob_errors(engine, model, prompts, SamplingOptions(max_tokens=given.tokens, seed=0))
            found = np.concatenate(errors)
            mean, size_of, largest = found.mean(), np.abs(found).mean(), errors.largest
            print(f"| {name} | {dtype} | {found.size} | {mean:+.1e} | {size_of:.1e} | {largest:.1e} |", flush=True)
            rows[f"{name} {dtype}"] = {"mean": mean, "absolute": size_of, "largest": largest}
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
