"""Grouped matrix products of `MosaicGrouped`: errors, speed of each tiling, and time of a whole layer.

Run it on one Hopper GPU. Prints each result as it is measured, and a summary and a JSON object at the end. With
`--ragged-dot-fusion`, it only times `jax.lax.ragged_dot` with XLA's cuDNN fusion, which may abort the process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from moe_dispatch import SHAPES, milliseconds

import axcore as ax
from axcore.nn import Blocks, FeedForward
from axcore_moe.dispatch import Dropless
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import TopK
from axcore_mosaic_gpu.grouped import MosaicGrouped
from axcore_mosaic_gpu.kernels import Tiling, groups_product, rows_product

ROWS, MULTIPROCESSORS = 128, 132
SIZES = (1, 63, 65, 129, 0, 300, 128, 0)


def tilings() -> Iterator[Tiling]:
    """The candidates."""
    for (n, stages, split_m), width in itertools.product(
        ((256, 4, False), (128, 5, False), (128, 5, True)), (1, 4, 16, -8)
    ):
        yield Tiling(ROWS, n, 64, stages, width, split_m)
    yield Tiling(ROWS, 256, 64, 3, 4, False)


def seconds(fn: Callable[..., jax.Array], *args: Any, rounds: int = 10) -> float:
    """Mean time of a call. The first call, which compiles, is left out."""
    compiled = jax.jit(fn)
    jax.block_until_ready(compiled(*args))
    start = time.perf_counter()
    jax.block_until_ready([compiled(*args) for _ in range(rounds)][-1])
    return (time.perf_counter() - start) / rounds


def attempt(label: str, fn: Callable[[], Any]) -> Any:
    """The result of fn, or None after printing the first line of its error."""
    try:
        return fn()
    except Exception as error:  # continue with the other variants
        print(f"{label}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}", flush=True)
        return None


def aligned(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """(padded sizes, group of each block, rows)."""
    padded = -(-sizes // ROWS) * ROWS
    rows = -(-int(sizes.sum()) // ROWS) * ROWS + len(sizes) * ROWS
    group = np.repeat(np.arange(len(sizes)), padded // ROWS)
    return padded, np.append(group, np.full(rows // ROWS - group.size, len(sizes) - 1)), rows


def check(tiles: Any, dtype: Any) -> dict[str, float]:
    """Largest error of each product, relative to the largest entry of the float64 result on the host."""
    sizes = np.asarray(SIZES)
    padded, group, rows = aligned(sizes)
    rng, k, n = np.random.default_rng(0), 320, 448
    starts = np.cumsum(padded) - padded
    filled = np.concatenate([start + np.arange(size) for start, size in zip(starts, sizes, strict=True)])
    x, g = np.zeros((rows, k)), np.zeros((rows, n))
    x[filled], g[filled] = rng.normal(size=(filled.size, k)), rng.normal(size=(filled.size, n))
    x, g, w = (jnp.asarray(value, dtype) for value in (x, g, rng.normal(size=(len(sizes), k, n))))
    indices = jnp.asarray(padded, jnp.int32), jnp.asarray(group, jnp.int32)
    out, pull = jax.jit(lambda x, w: jax.vjp(lambda x, w: tiles(x, w, *indices), x, w))(x, w)
    dx, dw = pull(g)
    x64, g64, w64 = (np.asarray(value, np.float64) for value in (x, g, w))
    expected = [np.zeros((rows, n)), np.zeros((rows, k)), np.zeros(w.shape)]
    for index, (start, size) in enumerate(zip(starts, padded, strict=True)):
        part = slice(start, start + size)
        expected[0][part], expected[1][part] = x64[part] @ w64[index], g64[part] @ w64[index].T
        expected[2][index] = x64[part].T @ g64[part]
    found = {}
    for name, value, right in zip(("forward", "dx", "dw"), (out, dx, dw), expected, strict=True):
        found[name] = float(np.abs(np.asarray(value, np.float64) - right).max() / np.abs(right).max())
    found["dw of empty groups"] = float(jnp.abs(dw[np.flatnonzero(sizes == 0)]).max())
    return found


def sweep(name: str, deadline: float) -> list[tuple[str, float, str]]:
    """(product, TF/s, tiling) of each tiling that runs."""
    tokens, dim, hidden, experts, top_k = SHAPES[name]
    sizes = np.random.default_rng(0).multinomial(tokens * top_k, np.full(experts, 1 / experts))
    padded, group, rows = aligned(sizes)
    group[padded.sum() // ROWS :] = experts
    ends, group = jnp.asarray(np.cumsum(padded), jnp.int32), jnp.asarray(group, jnp.int32)
    key, found = jax.random.key(0), []
    wide, narrow = (jax.random.normal(key, (rows, width), jnp.bfloat16) for width in (dim, hidden))
    up, down = (
        jax.random.normal(key, (experts, *shape), jnp.bfloat16) / 32 for shape in ((dim, hidden), (hidden, dim))
    )
    products: dict[str, Callable[[Any], tuple[Any, ...]]] = {}
    for label, left, right, w in (("up", wide, narrow, up), ("down", narrow, wide, down)):
        for transposed in (False, True):
            products[f"{label} {'dx' if transposed else 'forward'}"] = (
                lambda tiling, t=transposed, x=(right if transposed else left), w=w: (
                    lambda x, w, group: rows_product(
                        x, w, group, tiling=tiling, transposed=t, dtype=x.dtype, multiprocessors=MULTIPROCESSORS
                    ),
                    x,
                    w,
                    group,
                )
            )
        products[f"{label} dw"] = lambda tiling, x=left, y=right: (
            lambda x, y, ends: groups_product(
                x, y, ends, tiling=tiling, dtype=x.dtype, multiprocessors=MULTIPROCESSORS
            ),
            x,
            y,
            ends,
        )
    flops = 2 * tokens * top_k * dim * hidden
    for product, make in products.items():
        for tiling in tilings():
            if time.perf_counter() > deadline:
                print("out of time", flush=True)
                return found
            took = attempt(f"{product} {tiling}", lambda tiling=tiling, make=make: seconds(*make(tiling)))
            if took is not None:
                found.append((product, flops / took / 1e12, str(tiling)))
        best = sorted((entry for entry in found if entry[0] == product), key=lambda entry: -entry[1])[:5]
        for _, speed, text in best:
            print(f"{name} {product}: {speed:.0f} TF/s, {text}", flush=True)
    return found


def layers(name: str) -> dict[str, tuple[float, float]]:
    """Label -> (ms, GiB) of whole layers, forward and backward."""
    tokens, dim, hidden, experts, top_k = SHAPES[name]
    types = ax.DTypes(compute="bfloat16", param="bfloat16")
    moe = MoE.Config(
        input_dim=dim,
        num_experts=experts,
        router=TopK.Config(top_k=top_k),
        experts=Experts.Config(block=FeedForward.Config(hidden_dim=hidden)),
        dtypes=types,
    )
    found = {}
    for label, layer in {
        "plain block": FeedForward.Config(input_dim=dim, hidden_dim=top_k * hidden, dtypes=types),
        "Dropless(MosaicGrouped)": moe.set(dispatch=Dropless(matmul=MosaicGrouped())),
        "Dropless(Blocks)": moe.set(dispatch=Dropless(matmul=Blocks())),
    }.items():
        result = attempt(f"{name} {label}", lambda layer=layer: milliseconds(layer, tokens, dim, 10))
        if result is not None:
            found[label] = result
            print(f"{name} {label}: {result[0]:.2f} ms, {result[1]:.2f} GiB", flush=True)
    return found


def ragged_dot_fusion() -> None:
    """Times `jax.lax.ragged_dot` at the shape of Qwen3's up projection."""
    tokens, dim, hidden, experts, top_k = SHAPES["qwen3-30b-a3b"]
    x = jnp.ones((tokens * top_k, dim), jnp.bfloat16)
    w = jnp.ones((experts, dim, hidden), jnp.bfloat16)
    took = seconds(jax.lax.ragged_dot, x, w, jnp.full((experts,), tokens * top_k // experts, jnp.int32))
    print(f"{2 * tokens * top_k * dim * hidden / took / 1e12:.0f} TF/s")


def fused_in_subprocess() -> None:
    """Runs `ragged_dot_fusion` in another process with the flag that enables XLA's cuDNN fusion."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_experimental_use_ragged_dot_fusion=true"
    run = subprocess.run(
        [sys.executable, __file__, "--ragged-dot-fusion"],
        env={**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines() or ["no output"]
    print("ragged_dot with the cuDNN fusion:", run.returncode, lines[-1][:200], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["mixtral-8x7b", "qwen3-30b-a3b"])
    parser.add_argument("--seconds", type=float, default=240, help="time limit of the sweeps")
    parser.add_argument("--ragged-dot-fusion", action="store_true")
    arguments = parser.parse_args()
    if arguments.ragged_dot_fusion:
        ragged_dot_fusion()
        return
    device = jax.devices()[0]
    results: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "errors": {}, "layers": {}}
    print(device.device_kind, getattr(device, "core_count", None), "multiprocessors", flush=True)
    for dtype in (jnp.bfloat16, jnp.float16):
        errors = attempt(f"check {dtype.__name__}", lambda dtype=dtype: check(MosaicGrouped(), dtype))
        results["errors"][dtype.__name__] = errors
        print("relative errors", dtype.__name__, errors, flush=True)
    for name in arguments.shapes:
        results["layers"][name] = layers(name)
    attempt("ragged_dot with the cuDNN fusion", fused_in_subprocess)
    start = time.perf_counter()
    results["best"] = {}
    for number, name in enumerate(arguments.shapes, 1):
        found = sweep(name, start + arguments.seconds * number / len(arguments.shapes))
        for product in dict.fromkeys(entry[0] for entry in found):
            _, speed, text = max((entry for entry in found if entry[0] == product), key=lambda entry: entry[1])
            results["best"][f"{name} {product}"] = (round(speed), text)
    for label, (speed, text) in results["best"].items():
        print(f"best {label}: {speed} TF/s, {text}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
