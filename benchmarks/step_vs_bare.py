"""The training step of a Llama in axcore, compared with the same computation in bare JAX, on one accelerator.

Both are compiled with the same remat policy, unroll and flags, and timed in alternating blocks of steps. Prints a JSON
object on the last line. `scan_ratio` and `unrolled_ratio` are the step time of axcore over that of bare JAX (limit
1.02).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import glob
import json
import re
import statistics
import tempfile
import time
from typing import Any

import bare_llama
import jax
import jax.numpy as jnp
from llama_pair import axcore_program, bare_params, batch, documents_per_row, kernels_of

SAVED = ("query", "key", "value", "heads", "gate", "up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--attention", default="cudnn", help="cudnn, or reference on a machine without cuDNN")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="steps per block")
    parser.add_argument("--profile", action="store_true", help="also print the device time of each operation")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    shape = bare_llama.Shape(
        dim=arguments.dim,
        num_layers=arguments.layers,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=arguments.hidden,
        vocab_size=32_000,
        attention=arguments.attention,
        saved=SAVED,
    )
    figures: dict[str, Any] = {}
    for name, unroll in (("scan", 1), ("unrolled", arguments.layers)):
        figures |= compare(name, dataclasses.replace(shape, unroll=unroll), arguments)
    figures |= {"card": jax.devices()[0].device_kind, "jax": jax.__version__}
    print(json.dumps(figures))


def compare(name: str, shape: bare_llama.Shape, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times both programs with this shape. The names of the figures begin with `name`."""
    program = axcore_program(shape, [arguments.attention] if arguments.attention == "cudnn" else [])
    data = batch(arguments.batch, arguments.seq)
    ours = program.compile_train(data)
    state = program.init(jnp.uint32(0))
    params = jax.tree.map(jnp.copy, bare_params(state.params))
    transformation = bare_llama.optimizer(params)
    bare: Any = (params, transformation.init(params), jnp.int32(0), jnp.int32(2**31 - 1))
    step = bare_llama.make_step(shape, transformation)
    theirs = jax.jit(step, donate_argnums=(0, 1, 2, 3)).lower(*bare, data).compile()

    def run_ours() -> Any:
        nonlocal state
        state, metrics = ours(state, data)
        return metrics["loss"]

    def run_theirs() -> Any:
        nonlocal bare
        *bare, metrics = theirs(*bare, data)
        return metrics["loss"]

    losses = [[float(run()) for _ in range(3)] for run in (run_ours, run_theirs)]
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    assert difference < 2e-2, f"the two programs differ: {losses}"
    times: dict[Any, list[float]] = {run_ours: [], run_theirs: []}
    for _ in range(arguments.blocks):
        for run in times:
            began = time.perf_counter()
            for _ in range(arguments.steps):
                loss = run()
            jax.block_until_ready(loss)
            times[run].append((time.perf_counter() - began) / arguments.steps)
    if arguments.profile:
        for label, run in ((f"axcore {name}", run_ours), (f"bare {name}", run_theirs)):
            print(f"-- {label}: device milliseconds of one step, by operation")
            for operation, milliseconds in profile(run):
                print(f"{milliseconds:9.3f}  {operation}")
    axcore, bare_seconds = (statistics.median(seconds) for seconds in times.values())
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    memory = ours.memory_analysis(), theirs.memory_analysis()
    return {
        "kernel": kernels_of(program, data),
        "documents_per_row": round(documents_per_row(data), 2),
        f"{name}_ratio": round(statistics.median(ratios), 4),
        f"{name}_ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        f"{name}_axcore_ms": round(1e3 * axcore, 2),
        f"{name}_bare_ms": round(1e3 * bare_seconds, 2),
        f"{name}_axcore_tokens_per_s": round(arguments.batch * arguments.seq / axcore),
        f"{name}_temp_gib": [round(each.temp_size_in_bytes / 2**30, 2) for each in memory],
        f"{name}_loss_difference": difference,
    }


def profile(run: Any, steps: int = 3, top: int = 14) -> list[tuple[str, float]]:
    """(operation, device milliseconds of one step) from the profiler, longest first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                jax.block_until_ready(run())
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        totals: collections.Counter[str] = collections.Counter()
        for plane in jax.profiler.ProfileData.from_file(file).planes:
            if "/device:GPU" not in plane.name:
                continue
            for line in plane.lines:
                if "Stream" in line.name:
                    for event in line.events:
                        totals[_kind(event.name)] += event.duration_ns / 1e6 / steps
    return [("all", sum(totals.values())), *totals.most_common(top)]


def _kind(kernel: str) -> str:
    """`loop_dynamic_update_slice_fusion_12` -> `loop_dynamic_update_slice_fusion`."""
    return re.sub(r"[_.]?\d+", "", kernel)[:70]


if __name__ == "__main__":
    main()
