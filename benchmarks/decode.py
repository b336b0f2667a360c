"""Decoding of one row: axcore's `Generator` with a contiguous cache, compared with the same computation in bare JAX.

The model has the shape of Llama 2 7B and random bfloat16 weights. It gets a prompt of 512 tokens and generates 256,
greedily. Prints a JSON object with tokens/s and the milliseconds until the first token.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore.infer import Generator
from axcore.nn import Attention, CausalLM, ContiguousCache, FeedForward, Linear, Repeat, TransformerLayer

PROMPT, SAMPLED, CONTEXT = 512, 256, 1024
BFLOAT16 = jnp.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"dim": 4096, "layers": 32, "heads": 32, "hidden": 11008, "vocab": 32_000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=("axcore", "bare"))
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    if given.only != "bare":
        figures |= measured("axcore", axcore_sampler(given))
    if given.only != "axcore":
        figures |= measured("bare", bare_sampler(given))
    print(json.dumps(figures | {"card": jax.devices()[0].device_kind, "jax": jax.__version__}), flush=True)


def measured(name: str, sample: Callable[[int], Any]) -> dict[str, Any]:
    """Times a function that generates a given number of tokens."""

    def seconds(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(sample(count))
        return time.perf_counter() - began

    first = seconds(SAMPLED)
    seconds(1)
    one, full = (min(seconds(count) for _ in range(3)) for count in (1, SAMPLED))
    return {
        f"{name}_tokens_per_s": round((SAMPLED - 1) / (full - one), 1),
        f"{name}_first_token_ms": round(1e3 * one, 1),
        f"{name}_compile_s": round(first - full, 1),
    }


def axcore_sampler(given: Any) -> Callable[[int], Any]:
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=given.heads), ffn=FeedForward.Config(hidden_dim=given.hidden)
    )
    cfg = CausalLM.Config(
        vocab_size=given.vocab,
        dim=given.dim,
        dtypes=ax.DTypes(param=BFLOAT16, compute=BFLOAT16),
        decoder=Repeat.Config(num_layers=given.layers, layers=layer),
        head=Linear.Config(),
    )
    model = ax.pipe(cfg, ax.use("rope")).build(rngs=ax.Rngs(0))
    generator = Generator(model, context=CONTEXT, cache=ContiguousCache.Config(), temperature=0.0)
    prompt = np.random.default_rng(0).integers(3, given.vocab, PROMPT)
    return lambda count: generator(prompt, num_tokens=count, key=jax.random.key(0))


def bare_sampler(given: Any) -> Callable[[int], Any]:
    """The same decoding in bare JAX, with separate arrays for each layer and donated caches."""
    dim, hidden, heads, head_dim = given.dim, given.hidden, given.heads, given.dim // given.heads
    keys = iter(jax.random.split(jax.random.key(0), 7 * given.layers + 2))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape, BFLOAT16)

    sizes = {name: (dim, dim) for name in ("query", "key", "value", "projection")}
    sizes |= {"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}
    layers = [{name: normal(*size) for name, size in sizes.items()} for _ in range(given.layers)]
    weights = {"embedding": normal(given.vocab, dim), "head": normal(dim, given.vocab), "layers": layers}
    scale = jnp.ones((dim,), BFLOAT16)

    def norm(x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5)).astype(BFLOAT16) * scale

    def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
        angles = positions[:, None, None] / (10_000 ** (jnp.arange(0, head_dim, 2) / head_dim))
        first, second = jnp.split(x.astype(jnp.float32), 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(BFLOAT16)

    def forward(weights: Any, caches: Any, ids: jax.Array, start: jax.Array) -> tuple[jax.Array, Any]:
        x, positions, new = weights["embedding"][ids], start + jnp.arange(ids.size), []
        for layer, (held_k, held_v) in zip(weights["layers"], caches, strict=True):
            h = norm(x)
            q, k, v = ((h @ layer[name]).reshape(-1, heads, head_dim) for name in ("query", "key", "value"))
            held_k = jax.lax.dynamic_update_slice(held_k, rope(k, positions), (start, 0, 0))
            held_v = jax.lax.dynamic_update_slice(held_v, v, (start, 0, 0))
            logits = jnp.einsum("qhd,khd->hqk", rope(q, positions), held_k, preferred_element_type=jnp.float32)
            seen = jnp.arange(CONTEXT) <= positions[:, None]
            attended = jax.nn.softmax(jnp.where(seen, logits / head_dim**0.5, -1e30), -1).astype(BFLOAT16)
            x = x + jnp.einsum("hqk,khd->qhd", attended, held_v).reshape(-1, dim) @ layer["projection"]
            h = norm(x)
            x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
            new.append((held_k, held_v))
        return jnp.argmax(norm(x[-1]) @ weights["head"]), new

    @functools.partial(jax.jit, donate_argnums=1)
    def sample(weights: Any, caches: Any, prompt: jax.Array, count: jax.Array) -> Any:
        token, caches = forward(weights, caches, prompt, jnp.int32(0))

        def one(number: jax.Array, carry: Any) -> Any:
            token, caches, out = carry
            token, caches = forward(weights, caches, token[None], PROMPT + number)
            return token, caches, out.at[number].set(token)

        out = jnp.zeros((SAMPLED,), token.dtype)
        return jax.lax.fori_loop(0, count - 1, one, (token, caches, out))

    prompt = jax.random.randint(jax.random.key(1), (PROMPT,), 3, given.vocab)

    def run(count: int) -> Any:
        shape = (CONTEXT, heads, head_dim)
        caches = [(jnp.zeros(shape, BFLOAT16), jnp.zeros(shape, BFLOAT16)) for _ in range(given.layers)]
        return sample(weights, caches, prompt, jnp.int32(count))[0]

    return run


if __name__ == "__main__":
    main()
