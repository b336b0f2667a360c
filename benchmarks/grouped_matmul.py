"""Errors of `MosaicGrouped`, and the time and memory of whole layers with it.

Run it on one Hopper GPU; it takes up to 150 s. In this order:

1. Errors against float64: products and both gradients of two stacks of matrices together, for groups of 0, 1, 63, 65
   and more rows, in bfloat16 and float16, in units of the rounding error of the dtype.
2. Layers of Qwen3 30B-A3B and Mixtral 8x7B, forward and backward in bfloat16: the median of 10 times, and the memory
   for temporaries, relative to a plain block with as many active features. The bars are 1.3 x the time and 2 x the
   memory. Variants show the gain of one input gradient for gate and up, and of other orders of tiles (`width`).
3. With `--sweep`, the speed of each product in several tilings.

A case that fails is noted, and the others continue. All results are printed again at the end, then as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from moe_dispatch import SHAPES, milliseconds

import axcore as ax
from axcore.nn import Blocks, FeedForward, GroupedMatmul
from axcore_moe.dispatch import Dropless
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import TopK
from axcore_mosaic_gpu.grouped import MosaicGrouped, Tiles
from axcore_mosaic_gpu.kernels import Tiling, groups_product, rows_product

ROWS, MULTIPROCESSORS = 128, 132
SIZES = (1, 63, 65, 129, 0, 300, 128, 0)
DEFAULT = ("qwen3-30b-a3b", "mixtral-8x7b")
CHECKED = ((256, 384), (768, 512), (320, 448))
"""(input_dim, output_dim) of the checks. The last is not a multiple of the width of a tile."""


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


def check(matmul: MosaicGrouped, dtype: Any, widths: tuple[int, int]) -> dict[str, float]:
    """Errors of products and gradients with two stacks of matrices, relative to the largest entry of the float64 result
    on the host, in units of the rounding error of the dtype. At most 1 is expected."""
    sizes = np.asarray(SIZES)
    padded, group, rows = aligned(sizes)
    rng, (k, n) = np.random.default_rng(0), widths
    starts = np.cumsum(padded) - padded
    filled = np.concatenate([start + np.arange(size) for start, size in zip(starts, sizes, strict=True)])
    x = np.zeros((rows, k))
    x[filled] = rng.normal(size=(filled.size, k))
    gs = [np.zeros((rows, n)) for _ in range(2)]
    for g in gs:
        g[filled] = rng.normal(size=(filled.size, n))
    x, *gs = (jnp.asarray(value, dtype) for value in (x, *gs))
    several = tuple(jnp.asarray(rng.normal(size=(len(sizes), k, n)), dtype) for _ in range(2))
    indices = jnp.asarray(padded, jnp.int32), jnp.asarray(group, jnp.int32)

    @jax.jit
    def run(x: jax.Array, several: tuple[jax.Array, ...], gs: tuple[jax.Array, ...]) -> tuple[Any, ...]:
        outs, pull = jax.vjp(lambda x, several: matmul.each(x, several, *indices), x, several)
        return outs, *pull(gs)

    outs, dx, dws = run(x, several, tuple(gs))
    found: dict[str, float] = {}
    x64, sum64 = np.asarray(x, np.float64), np.zeros((rows, k))

    def compare(name: str, value: jax.Array, right: np.ndarray) -> None:
        error = float(np.abs(np.asarray(value, np.float64) - right).max() / np.abs(right).max())
        found[name] = round(max(found.get(name, 0.0), error / (float(jnp.finfo(dtype).eps) / 2)), 3)

    for out, w, g, dw in zip(outs, several, gs, dws, strict=True):
        w64, g64 = (np.asarray(value, np.float64) for value in (w, g))
        out64, dw64 = np.zeros((rows, n)), np.zeros(w.shape)
        for index, (start, size) in enumerate(zip(starts, padded, strict=True)):
            part = slice(start, start + size)
            out64[part], dw64[index] = x64[part] @ w64[index], x64[part].T @ g64[part]
            sum64[part] += g64[part] @ w64[index].T
        compare("forward", out, out64)
        compare("dw", dw, dw64)
        found["dw of empty groups"] = float(jnp.abs(dw[np.flatnonzero(sizes == 0)]).max())
    compare("dx", dx, sum64)
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
                        [(x, w)], group, tiling=tiling, transposed=t, dtype=x.dtype, multiprocessors=MULTIPROCESSORS
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


class Separate(MosaicGrouped):
    """Computes one input gradient for each of gate and up, and adds them."""

    def each(self, x: Any, several: Any, sizes: Any, group: Any, accumulate: Any = None) -> Any:
        return tuple(super(Separate, self).each(x, (matrices,), sizes, group, accumulate)[0] for matrices in several)


def variants(name: str) -> dict[str, Any]:
    """Label -> config of a layer. The most important come first."""
    _, dim, hidden, experts, top_k = SHAPES[name]
    types = ax.DTypes(compute="bfloat16", param="bfloat16")
    moe = MoE.Config(
        input_dim=dim,
        num_experts=experts,
        router=TopK.Config(top_k=top_k),
        experts=Experts.Config(block=FeedForward.Config(hidden_dim=hidden)),
        dtypes=types,
    )
    matmuls: dict[str, GroupedMatmul] = {"MosaicGrouped": MosaicGrouped(), "separate input gradients": Separate()}
    for width in (1, 4, 16):
        tiles = Tiles(width=width)
        matmuls[f"width={width}"] = MosaicGrouped(forward=tiles, input_gradient=tiles, weight_gradient=tiles)
    matmuls["Blocks"] = Blocks()
    return {
        "plain block": FeedForward.Config(input_dim=dim, hidden_dim=top_k * hidden, dtypes=types),
        **{label: moe.set(dispatch=Dropless(matmul=matmul)) for label, matmul in matmuls.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}; default: {' '.join(DEFAULT)}")
    parser.add_argument("--seconds", type=float, default=120, help="no case starts later (default: %(default)s)")
    parser.add_argument("--sweep", type=float, default=0, metavar="SECONDS", help="also sweep tilings for this long")
    arguments = parser.parse_args()
    start, names = time.perf_counter(), arguments.shapes or list(DEFAULT)
    device = jax.devices()[0]
    lines = [f"{device.device_kind}, {getattr(device, 'core_count', None)} multiprocessors, jax {jax.__version__}"]
    results: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "errors": {}, "layers": {}}

    def case(label: str, fn: Callable[[], Any]) -> Any:
        """The result of a case, or None after noting why there is none."""
        if time.perf_counter() - start > arguments.seconds:
            lines.append(f"{label}: left out, out of time")
            return None
        try:
            return fn()
        except Exception as error:  # continue with the other cases
            lines.append(f"{label}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
            return None

    for dtype, widths in itertools.product((jnp.bfloat16, jnp.float16), CHECKED):
        label = f"errors {dtype.__name__} {widths[0]} x {widths[1]}"
        found = case(label, lambda dtype=dtype, widths=widths: check(MosaicGrouped(), dtype, widths))
        if found is not None:
            right = max(found["forward"], found["dx"], found["dw"]) <= 1.01 and not found["dw of empty groups"]
            results["errors"][label] = found
            lines.append(f"{label}: {'right' if right else 'WRONG'} {found}")
            print(lines[-1], flush=True)
    made = {name: variants(name) for name in names}
    for label in next(iter(made.values())):  # both shapes first, then the next variant
        for name in names:
            tokens, dim, *_ = SHAPES[name]
            full = f"{name} {label}"
            found = case(full, lambda layer=made[name][label], t=tokens, d=dim: milliseconds(layer, t, d, 10))
            if found is None:
                continue
            results["layers"][full] = found
            ms, gib = found
            plain_ms, plain_gib = results["layers"].get(f"{name} plain block", found)
            lines.append(f"{full}: {ms:.2f} ms ({ms / plain_ms:.2f} x), {gib:.2f} GiB ({gib / plain_gib:.2f} x)")
            print(lines[-1], flush=True)
    begin = time.perf_counter()
    for number, name in enumerate(names, 1) if arguments.sweep else ():
        found = sweep(name, begin + arguments.sweep * number / len(names))
        for product in dict.fromkeys(entry[0] for entry in found):
            _, speed, text = max((entry for entry in found if entry[0] == product), key=lambda entry: entry[1])
            lines.append(f"best {name} {product}: {speed:.0f} TF/s, {text}")
    print(f"\n{time.perf_counter() - start:.0f} s", *lines, json.dumps(results), sep="\n")


if __name__ == "__main__":
    main()
