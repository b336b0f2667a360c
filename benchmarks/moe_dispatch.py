"""Time of a mixture of experts, forward and backward, for each dispatch.

The lower bound is a plain feed-forward block with the same number of active features. Prints a table for each shape,
and a JSON object on the last line. Run it on an accelerator.
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
from axcore.module import functional
from axcore.nn import Blocks, FeedForward, RaggedDot
from axcore_moe.dispatch import Capacity, Dense, Dropless
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.matmul import Tokamax
from axcore_moe.router import TopK

SHAPES = {
    # name: (tokens, dim, hidden features of an expert, experts, experts per token)
    "mixtral-8x7b": (8192, 4096, 14_336, 8, 2),
    "qwen3-30b-a3b": (16_384, 2048, 768, 128, 8),
    "tiny": (256, 64, 32, 8, 2),
}


def milliseconds(layer: Any, tokens: int, dim: int, rounds: int) -> tuple[float, float]:
    """(median time of forward and backward, GiB of temporaries)."""
    fn, params, state = functional(layer.build(rngs=ax.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (8, tokens // 8, dim), jnp.bfloat16)

    def objective(params: Any, x: jax.Array) -> jax.Array:
        # Gradients depend on the outputs, as in a model. With a linear objective, XLA computes parts of the forward
        # pass together with the backward pass, and keeps their inputs.
        return (fn(params, state, x)[0][0].astype(jnp.float32) ** 2).mean()

    compiled = jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(params, x).compile()
    jax.block_until_ready(compiled(params, x))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, x))
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times)), compiled.memory_analysis().temp_size_in_bytes / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["mixtral-8x7b", "qwen3-30b-a3b"])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    types = ax.DTypes(compute="bfloat16", param="bfloat16")
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for name in arguments.shapes:
        tokens, dim, hidden, experts, top_k = SHAPES[name]
        block = FeedForward.Config(hidden_dim=hidden)
        moe = MoE.Config(
            input_dim=dim,
            num_experts=experts,
            router=TopK.Config(top_k=top_k),
            experts=Experts.Config(block=block),
            dtypes=types,
        )
        layers = {
            "plain block": FeedForward.Config(input_dim=dim, hidden_dim=top_k * hidden, dtypes=types),
            "Dropless": moe.set(dispatch=Dropless()),
            "Dropless(Blocks(size=256))": moe.set(dispatch=Dropless(matmul=Blocks(size=256))),
            "Dropless(Blocks(size=1024))": moe.set(dispatch=Dropless(matmul=Blocks(size=1024))),
            "Dropless(Tokamax)": moe.set(dispatch=Dropless(matmul=Tokamax())),
            "Capacity(1.25)": moe.set(dispatch=Capacity(factor=1.25)),
        }
        if experts <= 8:
            layers["Dense"] = moe.set(dispatch=Dense())
            layers["Dropless(RaggedDot)"] = moe.set(dispatch=Dropless(matmul=RaggedDot()))
        print(f"\n{name}: {tokens} tokens, {dim} -> {hidden}, {top_k} of {experts} experts\n")
        print("| layer | ms | relative to the plain block | GiB of temporaries |\n|---|---:|---:|---:|")
        found = {}
        for label, layer in layers.items():
            try:
                found[label] = milliseconds(layer, tokens, dim, arguments.rounds)
            except Exception as error:  # if one variant fails on this machine, continue with the others
                print(f"| {label} | {type(error).__name__}: {str(error).splitlines()[0][:100]} | | |", flush=True)
                continue
            ms, gib = found[label]
            print(f"| {label} | {ms:.2f} | {ms / found['plain block'][0]:.2f} x | {gib:.2f} |", flush=True)
        results[name] = found
    print(json.dumps(results))


if __name__ == "__main__":
    main()
