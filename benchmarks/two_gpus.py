"""Each strategy of parallelism over two GPUs against one GPU: the same losses, tokens/s, and the time that `axcore aot`
estimates.

Trains a Llama of 1.1B parameters and a small mixture of experts on packed rows of real text. `--estimate` compiles for
the target instead and needs no GPU. Each case runs in its own process, so that one that fails leaves the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

ROWS, SEQ = 8, 4096
MODELS = ("dense", "moe")
STRATEGIES: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    "one GPU": ({}, 1),
    "data": ({"data": {"size": 2}}, 1),
    "fsdp": ({"fsdp": {"size": 2}}, 1),
    "tensor": ({"tensor": {"size": 2}}, 1),
    "tensor and sequence": ({"tensor": {"size": 2, "sequence": True}}, 1),
    "context, all-to-all": ({"context": {"size": 2}}, 1),
    # cuDNN has no kernel for packed queries and keys of different tokens
    "context, ring": (
        {"context": {"size": 2, "form": "ring-attention"}, "kernels": {"order": ("cudnn", "reference")}},
        1,
    ),
    "expert": ({"expert": {"size": 2}}, 1),
    "pipeline, 1F1B": ({"pipeline": {"size": 2}}, 8),
    "pipeline, interleaved 1F1B": ({"pipeline": {"size": 2, "chunks": 2}}, 8),
    "pipeline, zero bubble": ({"pipeline": {"size": 2, "schedule": "zero-bubble"}}, 8),
}
"""Name of a strategy -> (its features and their options, the number of microbatches)."""


def accelerator(strategy: str) -> str:
    return "gpu-h200-2" if STRATEGIES[strategy][0] else "gpu-h200-1"


def config(model: str, strategy: str) -> Any:
    """The config of a trainer."""
    import axcore as ax

    features, microbatches = STRATEGIES[strategy]
    cfg = ax.recipe("llama-1b")
    if model == "moe":
        cfg = ax.override(ax.pipe(cfg, ax.use("moe", num_experts=8)), ["model.decoder.num_layers=4"])
    cfg = ax.pipe(cfg, ax.target(accelerator(strategy)))
    text = ax.recipe("quickstart").input.set(batch_size=ROWS, seq_len=SEQ)
    cfg = cfg.set(input=text, microbatches=microbatches)
    return ax.pipe(cfg, *(ax.use(feature, **options) for feature, options in features.items()))


def estimate(model: str, strategy: str) -> dict[str, Any]:
    from axcore.aot import compile_program

    report = compile_program(config(model, strategy), accelerator(strategy))
    if report.estimate is None:
        return {"error": report.verdict}
    seconds = report.estimate.step
    return {
        "tokens_per_s": round(report.tokens / seconds),
        "step_ms": round(1e3 * seconds, 1),
        "memory_gib": round(report.memory.total / 2**30, 1),
    }


def run(model: str, strategy: str, steps: int) -> dict[str, Any]:
    import itertools

    import jax
    import jax.numpy as jnp
    import numpy as np

    cfg = config(model, strategy)
    made = cfg.build().program(devices=jax.devices()[: 2 if STRATEGIES[strategy][0] else 1])
    batches = list(itertools.islice(cfg.input.build().train_batches(), steps))
    shardings = jax.tree.map(lambda shape: shape.sharding, made.batch_shapes(batches[0]))
    began = time.perf_counter()
    step = made.compile_train(batches[0])
    compiling = time.perf_counter() - began
    state = made.init(jnp.uint32(0))
    losses, times = [], []
    for batch in batches:
        placed = jax.block_until_ready(jax.device_put(batch, shardings))
        began = time.perf_counter()
        state, metrics = step(state, placed)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - began)
    seconds = float(np.median(times[3:]))
    peak = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices())
    return {
        "tokens_per_s": round(ROWS * SEQ / seconds),
        "step_ms": round(1e3 * seconds, 1),
        "compile_s": round(compiling, 1),
        "peak_gib": round(peak / 2**30, 1),
        "loss": round(losses[-1], 5),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--estimate", action="store_true", help="compile for the target; needs axcore[aot-cuda]")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--case", action="store_true", help="only the first model and strategy, in this process")
    given = parser.parse_args()
    if given.case:
        model, strategy = given.models[0], given.strategies[0]
        found = estimate(model, strategy) if given.estimate else run(model, strategy, given.steps)
        print(json.dumps({"model": model, "strategy": strategy} | found), flush=True)
        return
    shared = [sys.executable, __file__, "--case", "--steps", str(given.steps), *(["--estimate"] * given.estimate)]
    for model in given.models:
        single: list[float] = []
        for strategy in given.strategies:
            if model == "dense" and strategy == "expert":
                continue
            command = [*shared, "--models", model, "--strategies", strategy]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                print(f"{model}, {strategy}: failed\n{done.stderr[-1500:]}", flush=True)
                continue
            found = json.loads(lines[-1])
            losses = found.pop("losses", [])
            single = single or losses
            if single and losses:
                pairs = zip(losses, single, strict=True)
                found["largest_difference"] = max(abs(one / other - 1) for one, other in pairs)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
