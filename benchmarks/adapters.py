"""The cost of adapters per request: a step of a decoder with and without them, and two ways to multiply.

    python benchmarks/adapters.py [--dim 1024] [--layers 4] [--slots 4 8] [--rank 16] [--rounds 9]

Each line of JSON has medians in milliseconds over rounds that alternate between the variants.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.nn import Attention, CausalLM, ContiguousCache, FeedForward, Repeat, TransformerLayer
from axcore_lora import LoRAAdapters

VOCAB, MAX_LEN = 4096, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    for rows, width in ((1, 1), (8, 1), (1, 256)):
        times = medians(steps(given, rows, width), given.rounds)
        print(json.dumps({"rows": rows, "width": width} | times), flush=True)
    for tokens in (1, 8, 32, 256):
        for slots in given.slots:
            times = medians(products(given.dim, slots, given.rank, tokens), given.rounds)
            print(json.dumps({"tokens": tokens, "slots": slots} | times), flush=True)


def steps(given: argparse.Namespace, rows: int, width: int) -> dict[str, Callable[[], object]]:
    """A step of the model without adapters, fused and not fused, and with room for adapters."""
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=given.dim // 64),
        ffn=FeedForward.Config(hidden_dim=given.dim * 8 // 3 // 64 * 64),
    )
    decoder = Repeat.Config(num_layers=given.layers, layers=layer)
    cfg = ax.pipe(CausalLM.Config(vocab_size=VOCAB, dim=given.dim, decoder=decoder), ax.use("rope"))
    model = cfg.build(rngs=ax.Rngs(0))
    variants: dict[str, tuple[bool, LoRAAdapters | None]] = {"fused": (True, None), "not_fused": (False, None)}
    for slots in given.slots:
        adapters = LoRAAdapters.Config(max_adapters=slots, max_rank=given.rank).build()
        variants[f"adapters_{slots}"] = True, adapters
    return {name: _step(model, rows, width, *variant) for name, variant in variants.items()}


def _step(model: ax.Layer, rows: int, width: int, fuse: bool, adapters: LoRAAdapters | None) -> Callable[[], object]:
    decoder, params, state = Decoder.of(
        model, cache=ContiguousCache.Config(), batch_size=rows, max_len=MAX_LEN, fuse=fuse, adapters=adapters
    )
    slots = None if adapters is None else np.arange(rows) % adapters.config.max_adapters
    step = Step(
        np.ones((rows, width), np.int32),
        start=np.zeros(rows, np.int32),
        logits_at=np.full((rows, 1), width - 1),
        adapters=slots,
    )
    run, held = jax.jit(decoder, donate_argnums=1), [state]

    def once() -> object:
        logits, held[0] = run(params, held[0], step)
        return logits

    return once


def products(dim: int, slots: int, rank: int, tokens: int) -> dict[str, Callable[[], object]]:
    """The change of one layer: products with all slots, of which each token keeps its own, and products with the
    matrices that each token gathers."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (tokens, dim))
    a, b = jax.random.normal(keys[1], (dim, slots, rank)), jax.random.normal(keys[2], (slots, rank, dim))
    by_slot = jnp.moveaxis(a, 1, 0)
    slot = jax.random.randint(keys[3], (tokens,), 0, slots)

    @jax.jit
    def masked(x: jax.Array, slot: jax.Array) -> jax.Array:
        narrow = (x @ a.reshape(dim, -1)).reshape(tokens, slots, rank)
        narrow = jnp.where((slot[:, None] == jnp.arange(slots))[:, :, None], narrow, 0)
        return narrow.reshape(tokens, -1) @ b.reshape(-1, dim)

    @jax.jit
    def gathered(x: jax.Array, slot: jax.Array) -> jax.Array:
        return jnp.einsum("tr,tro->to", jnp.einsum("ti,tir->tr", x, by_slot[slot]), b[slot])

    np.testing.assert_allclose(masked(x, slot), gathered(x, slot), rtol=1e-3, atol=1e-2)
    return {"masked": lambda: masked(x, slot), "gathered": lambda: gathered(x, slot)}


def medians(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each variant."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 2):
        for name, run in variants.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if number >= 2:  # the first calls compile
                times[name].append(time.perf_counter() - start)
    return {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()}


if __name__ == "__main__":
    main()
