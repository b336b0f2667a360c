"""Decoding steps with each KV cache: the milliseconds of a step of one token per row, and the bytes of the caches.

The model has the shape of some layers of Llama 3 8B and random bfloat16 weights. Rows have `--length` tokens. Pages are
in random order, with as many pages as the rows need. "by slot" reads blocks of the rows' slots in place, as an engine's
prompts do. Prints one JSON object per cache as soon as it is measured, then a
list of all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.nn import Attention, CausalLM, ContiguousCache, FeedForward, KVCache, Linear, Repeat, TransformerLayer
from axcore_paged_kv.cache import PagedCache
from axcore_ring_kv.cache import RingCache

STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"dim": 4096, "layers": 8, "heads": 32, "kv-heads": 8, "hidden": 14_336, "vocab": 128_256}
    for name, default in (sizes | {"rows": 32, "length": 4096, "window": 1024, "page-size": 16}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    model, windowed = built(given), built(given, ax.use("sliding-window", size=given.window))
    pages = {"page_size": given.page_size}
    caches: dict[str, tuple[Any, KVCache.Config]] = {
        "contiguous": (model, ContiguousCache.Config()),
        "contiguous, by slot": (model, ContiguousCache.Config()),
        "contiguous int8": (model, ContiguousCache.Config(dtype="int8")),
        "paged": (model, PagedCache.Config(**pages)),
        "paged int8": (model, PagedCache.Config(**pages, dtype="int8")),
        "paged float8": (model, PagedCache.Config(**pages, dtype="float8_e4m3fn")),
        "window, contiguous": (windowed, ContiguousCache.Config()),
        "window, ring": (windowed, RingCache.Config(window=given.window)),
    }
    found = []
    for name, (each, cache) in caches.items():
        found.append({"cache": name} | measured(each, cache, given, by_slot="slot" in name))
        print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"card": jax.devices()[0].device_kind, "jax": jax.__version__, "caches": found}), flush=True)


def built(given: Any, *features: Any) -> Any:
    attention = Attention.Config(num_heads=given.heads, num_kv_heads=given.kv_heads)
    layer = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=given.hidden))
    cfg = CausalLM.Config(
        vocab_size=given.vocab,
        dim=given.dim,
        dtypes=ax.DTypes(param=jnp.bfloat16, compute=jnp.bfloat16),
        decoder=Repeat.Config(num_layers=given.layers, layers=layer),
        head=Linear.Config(),
    )
    return ax.pipe(cfg, ax.use("rope"), *features).build(rngs=ax.Rngs(0))


def measured(model: Any, cache: KVCache.Config, given: Any, by_slot: bool) -> dict[str, Any]:
    max_len = given.length + 2 * STEPS + 1
    decoder, params, state = Decoder.of(model, cache=cache, batch_size=given.rows, max_len=max_len)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    tables = None
    if decoder.paging is not None:
        order = np.random.default_rng(0).permutation(decoder.paging.num_pages)
        tables = jnp.asarray(order.reshape(given.rows, -1), jnp.int32)
    run = jax.jit(decoder.__call__, donate_argnums=1)
    ids = jnp.ones((given.rows, 1), jnp.int32)
    slots = jnp.arange(given.rows) if by_slot else None
    # Lengths of rows are the only arrays of one dimension. Keys and values stay zero.
    state = jax.tree.map(lambda x: jnp.full_like(x, given.length) if x.ndim == 1 else x, state)

    def steps(state: Any, first: int) -> tuple[float, Any]:
        began = time.perf_counter()
        for at in range(first, first + STEPS):
            start = jnp.full((given.rows,), at, jnp.int32)
            logits, state = run(params, state, Step(ids, start, slots=slots, pages=tables))
        jax.block_until_ready(logits)
        return time.perf_counter() - began, state

    _, state = steps(state, given.length)
    seconds, _ = steps(state, given.length + STEPS)
    return {"step_ms": round(1e3 * seconds / STEPS, 3), "cache_gb": round(held / 1e9, 3)}


if __name__ == "__main__":
    main()
