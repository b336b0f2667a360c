"""Host overhead of axcore over bare JAX: tracing, dispatch, and compile time by depth.

Prints a JSON object on the last line: `trace_ratio` (32 scanned layers; limit 1.15), `dispatch_ratio` (steady step on
tiny arrays; limit 1.10) and `compile_flatness` (compile time of 96 scanned layers over that of 2; limit 1.15).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import bare_llama
import jax
import jax.numpy as jnp
from llama_pair import axcore_program, bare_params, batch

SHAPE = bare_llama.Shape(
    dim=16, num_layers=32, num_heads=2, num_kv_heads=1, hidden_dim=32, vocab_size=264, compute=jnp.float32
)


def seconds(fn: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    gc.collect()
    began = clock()
    fn()
    return clock() - began


def pair(
    a: Callable[[], Any],
    b: Callable[[], Any],
    rounds: int,
    before: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Median seconds of each function. They run in turn, so that drift of the machine affects both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for fn, kept in zip((a, b), times, strict=True):
            before()
            kept.append(seconds(fn, clock))
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    jax.config.update("jax_enable_compilation_cache", False)

    program, data = axcore_program(SHAPE), batch(2, 8)
    state = program.init(jnp.uint32(0))
    params = jax.tree.map(jnp.copy, bare_params(state.params))
    transformation = bare_llama.optimizer(params)
    bare_step = bare_llama.make_step(SHAPE, transformation)
    bare_state = (params, transformation.init(params), jnp.int32(0), jnp.int32(2**31 - 1))

    traced = pair(
        lambda: jax.jit(program.train_step).trace(state, data),
        lambda: jax.jit(bare_step).trace(*bare_state, data),
        rounds,
        jax.clear_caches,
        time.process_time,  # tracing uses one thread, and other processes should not count
    )

    ours = program.compile_train(data)
    theirs = jax.jit(bare_step, donate_argnums=(0, 1, 2, 3)).lower(*bare_state, data).compile()
    state, metrics = ours(state, data)
    *bare_state, bare_metrics = theirs(*bare_state, data)  # type: ignore[assignment]
    difference = abs(float(metrics["loss"]) - float(bare_metrics["loss"]))
    assert difference < 1e-5, f"the two programs differ: {metrics['loss']} and {bare_metrics['loss']}"

    def run_ours(steps: int = 100) -> None:
        nonlocal state
        for _ in range(steps):
            state, metrics = ours(state, data)
        jax.block_until_ready(metrics)

    def run_theirs(steps: int = 100) -> None:
        nonlocal bare_state
        for _ in range(steps):
            *bare_state, metrics = theirs(*bare_state, data)  # type: ignore[assignment]
        jax.block_until_ready(metrics)

    run_ours(), run_theirs()
    dispatched = pair(run_ours, run_theirs, 3 * rounds)

    def compile_depth(depth: int) -> float:
        deep = axcore_program(dataclasses.replace(SHAPE, num_layers=depth))
        lowered = jax.jit(deep.train_step, donate_argnums=0).lower(deep.state, deep.batch_shapes(data))
        return seconds(lowered.compile)

    times = {depth: [compile_depth(depth) for _ in range(max(3, rounds // 2))] for depth in (96, 2)}
    compiled = [statistics.median(each) for each in times.values()]

    figures = {
        "trace_ratio": round(traced[0] / traced[1], 3),
        "dispatch_ratio": round(dispatched[0] / dispatched[1], 3),
        "compile_flatness": round(compiled[0] / compiled[1], 3),
        "trace_ms": round(1e3 * traced[0], 1),
        "bare_trace_ms": round(1e3 * traced[1], 1),
        "step_us": round(1e4 * dispatched[0], 1),
        "bare_step_us": round(1e4 * dispatched[1], 1),
        "compile_s": round(compiled[0], 2),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
