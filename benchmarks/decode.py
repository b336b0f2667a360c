"""Decoding of one row on one GPU: axcore's `Decoder` in several variants, and the same computation in bare JAX.

The model has the shape of Llama 2 7B and random weights, in bfloat16 or with int8 codes. Each figure is the time of
one step with 512 tokens in a contiguous cache of 1,024, as the difference of two loops on the device. Prints one JSON
object per case as it finishes, and all of them again at the end, with the share of the bound: the bytes of all weights
but the embedding, read at the copy bandwidth of the card, which the same call measures.

    python benchmarks/decode.py --seconds 190
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from copy_bandwidth import copy_bandwidth

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.nn import Attention, CausalLM, ContiguousCache, FeedForward, Linear, Repeat, TransformerLayer
from axcore_gemv.feature import use_gemv
from axcore_gemv.kernel import Tiling, product
from axcore_gemv.matmul import Gemv

CACHED, STEPS, CONTEXT = 512, 64, 1024
BFLOAT16 = jnp.bfloat16
CACHE = {"cache": ContiguousCache.Config(), "batch_size": 1, "max_len": CONTEXT}
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"dim": 4096, "layers": 32, "heads": 32, "hidden": 11008, "vocab": 32_000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=190, help="no case starts later than this")
    parser.add_argument("--only", default="", help="runs only cases whose names contain this, and the bandwidth")
    given = parser.parse_args()
    began, results = time.perf_counter(), []
    for name, case in cases(given):
        if given.only not in name and name not in ("copy bandwidth", "release"):
            continue
        if time.perf_counter() - began > given.seconds:
            results.append({"case": name, "skipped": "out of time"})
            continue
        start = time.perf_counter()
        try:
            figures = case()
        except Exception as error:  # the other cases still run
            figures = {"error": f"{type(error).__name__}: {error}"[:400]}
        if name == "release":
            continue
        results.append({"case": name, **figures, "case_s": round(time.perf_counter() - start, 1)})
        print(json.dumps(results[-1]), flush=True)
    bandwidth = next((each["copy_gb_per_s"] for each in results if "copy_gb_per_s" in each), None)
    print("--- results", jax.devices()[0].device_kind, "jax", jax.__version__)
    for each in results:
        if bandwidth and "step_ms" in each:
            each["share_of_bound"] = round(each["gb"] / bandwidth * 1e3 / each["step_ms"], 3)
        print(json.dumps(each))


def cases(given: Any) -> Iterator[tuple[str, Callable[[], Figures]]]:
    yield "copy bandwidth", lambda: {"copy_gb_per_s": round(copy_bandwidth() / 1e9)}
    yield "numerics", functools.partial(check, given)
    floats = Shared(given, int8=False)
    yield "axcore, fused", functools.partial(floats.measured, lambda cfg: cfg)
    yield "axcore, fused, gemv", functools.partial(floats.measured, use_gemv)
    yield "axcore, fused, gemv, cudnn", functools.partial(floats.measured, lambda cfg: ax.use("cudnn")(use_gemv(cfg)))
    yield "release", floats.clear
    codes = Shared(given, int8=True)
    yield "axcore, fused, int8, gemv", functools.partial(codes.measured, use_gemv)
    yield "release", codes.clear
    yield "bare JAX", functools.partial(bare, given)
    apart = Shared(given, int8=False, fuse=False)
    yield "axcore, not fused", functools.partial(apart.measured, lambda cfg: cfg)
    yield "release", apart.clear
    codes = Shared(given, int8=True)
    yield "axcore, fused, int8", functools.partial(codes.measured, lambda cfg: cfg)
    yield "release", codes.clear
    for shape in ((given.dim, 3 * given.dim), (given.dim, given.dim), (given.hidden, given.dim)):
        yield f"products {shape}", functools.partial(products, *shape)
    yield f"products {given.dim, 2 * given.hidden}", functools.partial(products, given.dim, 2 * given.hidden)


def seconds(run: Callable[[int], Any], few: int, many: int) -> float:
    """Seconds of one of the operations that `run` performs a given number of times."""

    def once(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(count))
        return time.perf_counter() - began

    once(few)
    short, long = (min(once(count) for _ in range(3)) for count in (few, many))
    return (long - short) / (many - few)


def check(given: Any) -> Figures:
    """The largest error of the kernel relative to float64, in units of the largest product."""
    rng, found = np.random.default_rng(0), {}
    w = rng.integers(-127, 128, (given.dim, 1024))
    for dtype in (BFLOAT16, jnp.int8, jnp.float8_e4m3fn):
        x = jnp.asarray(rng.normal(size=(1, given.dim)), BFLOAT16)
        weight = jnp.asarray(w, jnp.float32).astype(dtype)
        right = np.asarray(x, np.float64) @ np.asarray(weight.astype(jnp.float32), np.float64)
        made = jax.jit(lambda x, weight: Gemv()(x, weight, jnp.float32))(x, weight)
        error = np.abs(np.asarray(made, np.float64) - right).max() / np.abs(right).max()
        if not error < 1e-4:
            raise AssertionError(f"{dtype.__name__}: error {error}")
        found[dtype.__name__] = float(f"{error:.1e}")
    return {"errors": found}


TILINGS = ((2, 8), (4, 5), (4, 6), (4, 8), (8, 3), (8, 4), (8, 5), (16, 1), (16, 2))
"""Tilings to measure: (warps, programs of a multiprocessor)."""


def products(depth: int, columns: int) -> Figures:
    """Microseconds of one product in each dtype, as the kernel and XLA compute it, as the profiler sees them on the
    device. The weights exceed the L2 cache and are in column-major order."""
    found: Figures = {}
    for dtype in (BFLOAT16, jnp.int8):
        copies = max(2, int(1.5e8 / (depth * columns * dtype(0).dtype.itemsize)))
        keys = jax.random.split(jax.random.key(0), copies)
        weights = [jax.random.randint(key, (columns, depth), -127, 128, jnp.int8).astype(dtype) for key in keys]
        x = jax.random.normal(keys[0], (depth,), BFLOAT16)
        variants: dict[str, Any] = {"xla": lambda x, w: w.astype(BFLOAT16) @ x}
        for warps, programs in TILINGS:
            tiling = Tiling(warps, min(columns, 132 * programs))
            variants[str((warps, programs))] = functools.partial(product, dtype=BFLOAT16, tiling=tiling)
        for name, variant in variants.items():
            try:
                found[f"{dtype.__name__} {name}"] = round(device_us(jax.jit(variant), x, weights), 1)
            except Exception as error:
                found[f"{dtype.__name__} {name}"] = f"{type(error).__name__}: {error}"[:200]
    return found


def device_us(run: Callable[..., jax.Array], x: jax.Array, weights: list[jax.Array]) -> float:
    """The sum of the median times of the kernels of one call."""
    for weight in weights[:1]:
        jax.block_until_ready(run(x, weight))
    calls = 24
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for number in range(calls):
                made = run(x, weights[number % len(weights)])
            jax.block_until_ready(made)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    times: dict[str, list[float]] = {}
    for plane in data.planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if "Stream" in line.name else ():
                times.setdefault(event.name, []).append(event.duration_ns / 1e3)
    return sum(statistics.median(each) * round(len(each) / calls) for each in times.values())


class Shared:
    """Variants of a model that have the same parameters."""

    def __init__(self, given: Any, *, int8: bool, fuse: bool = True):
        layer = TransformerLayer.Config(
            attention=Attention.Config(num_heads=given.heads), ffn=FeedForward.Config(hidden_dim=given.hidden)
        )
        cfg: Any = CausalLM.Config(
            vocab_size=given.vocab,
            dim=given.dim,
            dtypes=ax.DTypes(param=BFLOAT16, compute=BFLOAT16),
            decoder=Repeat.Config(num_layers=given.layers, layers=layer),
            head=Linear.Config(),
        )
        cfg = ax.pipe(cfg, ax.use("rope"))
        if int8:
            cfg = ax.use("int8", activation_scales=None)(cfg)
            cfg = ax.select(cfg, lambda _, node: hasattr(node, "stored")).set(stored=True)
        self.cfg, self.fuse, self.params, self.first = cfg, fuse, None, None

    def clear(self) -> Figures:
        self.params = self.first = None
        return {}

    def measured(self, edit: Callable[[Any], Any]) -> Figures:
        if self.params is None:
            model = self.cfg.build(rngs=ax.Rngs(0))
            self.params = Decoder.of(model, **CACHE, fuse=self.fuse)[1]
            del model
        vocab_size = self.cfg.vocab_size
        decoder, _, forms = Decoder.abstract(edit(self.cfg), **CACHE, fuse=self.fuse)
        read = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        read -= sum(leaf.nbytes for leaf in jax.tree.leaves(self.params["embedding"]))

        @jax.jit
        def loop(params: Any, state: Any, count: jax.Array) -> Any:
            def one(number: jax.Array, carry: Any) -> Any:
                ids, state, _ = carry
                step = Step(ids, start=(CACHED + number)[None], phase="decode")
                logits, state = decoder(params, state, step)
                return jnp.argmax(logits[:, 0], -1).astype(jnp.int32)[:, None], state, logits

            logits = jnp.zeros((1, 1, vocab_size), jnp.float32)
            return jax.lax.fori_loop(0, count, one, (jnp.ones((1, 1), jnp.int32), state, logits))[::2]

        def run(count: int) -> Any:
            state = jax.tree.map(lambda form: jnp.zeros(form.shape, form.dtype), forms)
            state["lengths"] = jnp.full((1,), CACHED, jnp.int32)
            return loop(self.params, state, jnp.int32(count))

        began = time.perf_counter()
        logits = np.asarray(run(1)[1])
        compiled = time.perf_counter() - began
        step = seconds(run, 1, STEPS)
        figures = {"step_ms": round(1e3 * step, 3), "tokens_per_s": round(1 / step, 1), "gb": round(read / 1e9, 3)}
        if self.first is None:
            self.first = logits
        error = float(np.abs(logits - self.first).max() / np.abs(self.first).max())
        return {**figures, "compile_s": round(compiled, 1), "logits_differ_by": round(error, 5)}


def bare(given: Any) -> Figures:
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

    @jax.jit
    def loop(weights: Any, caches: Any, count: jax.Array) -> Any:
        def one(number: jax.Array, carry: Any) -> Any:
            token, caches = carry
            return forward(weights, caches, token[None], CACHED + number)

        return jax.lax.fori_loop(0, count, one, (jnp.int32(1), caches))[0]

    def run(count: int) -> Any:
        shape = (CONTEXT, heads, head_dim)
        caches = [(jnp.zeros(shape, BFLOAT16), jnp.zeros(shape, BFLOAT16)) for _ in range(given.layers)]
        return loop(weights, caches, jnp.int32(count))

    step = seconds(run, 1, STEPS)
    read = sum(leaf.nbytes for leaf in jax.tree.leaves((weights["layers"], weights["head"])))
    return {"step_ms": round(1e3 * step, 3), "tokens_per_s": round(1 / step, 1), "gb": round(read / 1e9, 3)}


if __name__ == "__main__":
    main()
