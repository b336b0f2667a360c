"""What `axcore plan` predicts for training steps on one GPU, beside the compiler's memory, the allocator's peak and the
measured time.

Prints one JSON object per case, then the errors and the rank correlation. Each case runs in its own process, since the
allocator's peak never falls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any, NamedTuple

TARGET = "gpu-h200-1"


class Case(NamedTuple):
    name: str
    rows: int
    seq: int = 2048
    remat: str | None = None
    microbatches: int = 1
    sets: tuple[str, ...] = ()
    moe: bool = False


CASES = (
    Case("1.1B, save all", 8),
    Case("1.1B, save all", 16),
    Case("1.1B, save inputs", 16, remat="inputs"),
    Case("1.1B, save inputs", 64, remat="inputs"),
    Case("1.1B, save tags", 32, remat="tags"),
    Case("1.1B, 2 microbatches", 32, microbatches=2, remat="tags"),
    Case("4 layers of 7B", 8, 4096, None, 1, ("model.dim=4096", "model.decoder.num_layers=4")),
    Case("8 layers of 7B, save inputs", 8, 4096, "inputs", 1, ("model.dim=4096", "model.decoder.num_layers=8")),
    Case("mixture of 8, save inputs", 16, remat="inputs", sets=("model.decoder.num_layers=6",), moe=True),
)


def config(case: Case) -> Any:
    import axcore as ax
    from axcore.nn import use_remat
    from axcore.parallel import ByTag, Remat

    cfg = ax.pipe(ax.recipe("llama-1b"), ax.target(TARGET))
    if case.moe:
        cfg = ax.pipe(cfg, ax.use("moe", num_experts=8))
    cfg = ax.override(cfg, [*case.sets, f"input.batch_size={case.rows}", f"input.seq_len={case.seq}"])
    policy = {None: None, "inputs": Remat(), "tags": ByTag(save=("query", "key", "value", "heads", "lse"))}[case.remat]
    return use_remat(cfg, policy).set(microbatches=case.microbatches)


def run(case: Case, steps: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from llama_pair import batch

    from axcore.aot.plan.model import Candidate
    from axcore.aot.plan.search import Search
    from axcore.aot.targets import Target
    from axcore.config import walk
    from axcore.nn import Repeat
    from axcore.train import Trainer

    cfg = config(case)
    stack = next(node for _, node in walk(cfg.model) if isinstance(node, Repeat.Config))
    candidate = Candidate({"data": 1}, stack.remat, case.microbatches, stack.unroll > 1)
    search = Search(cfg, Target.of(TARGET))
    figures = search.choice(candidate).figures
    search.measure(search.choice(candidate))
    planned = search.choice(candidate)
    trainer: Trainer = cfg.build()
    made = trainer.program()
    data = batch(case.rows, case.seq)
    compiled = made.lower_train(data).compile(made.compiler_options)
    memory = compiled.memory_analysis()
    data = jax.device_put(data, jax.tree.map(lambda shape: shape.sharding, made.batch_shapes(data)))
    state = made.init(jnp.uint32(0))
    times = []
    for _ in range(2 + steps):
        began = time.perf_counter()
        state, metrics = compiled(state, data)
        float(metrics["loss"])
        times.append(time.perf_counter() - began)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "case": f"{case.name}, {case.rows} x {case.seq}",
        "formula_gib": round(figures.total / 2**30, 2),
        "predicted_gib": round(planned.memory / 2**30, 2),
        "predicted_from": planned.source,
        "compiler_gib": round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30, 2),
        "peak_gib": round(peak / 2**30, 2),
        "predicted_ms": round(1e3 * figures.step, 1),
        "measured_ms": round(1e3 * float(np.median(times[2:])), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, help="run only this one, in this process")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    if given.case is not None:
        print(json.dumps(run(CASES[given.case], given.steps)), flush=True)
        return
    found = []
    for number in range(len(CASES)):
        command = [sys.executable, __file__, "--steps", str(given.steps), "--case", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout.strip() or done.stderr[-600:], flush=True)
        found += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    memory = [abs(each["predicted_gib"] / each["peak_gib"] - 1) for each in found]
    step = [abs(each["predicted_ms"] / each["measured_ms"] - 1) for each in found]

    def ranks(name: str) -> list[int]:
        order = sorted(range(len(found)), key=lambda index: found[index][name])
        return [order.index(index) for index in range(len(found))]

    squares = sum((one - other) ** 2 for one, other in zip(ranks("predicted_ms"), ranks("measured_ms"), strict=True))
    correlation = 1 - 6 * squares / (len(found) * (len(found) ** 2 - 1))
    print(
        f"largest error: memory {max(memory):.1%}, step {max(step):.1%}; mean {sum(memory) / len(memory):.1%}, "
        f"{sum(step) / len(step):.1%}; rank correlation of steps {correlation:.3f}"
    )


if __name__ == "__main__":
    main()
