"""The planner's memory against the compiler's, for training steps of published models: a table for docs/aot.md.

python benchmarks/planner_memory.py [NUMBER ...]   # the cases of these numbers; requires axcore[aot-cuda]

Each case compiles for minutes on two cores.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import axcore as ax
from axcore.aot import Target, compile_program
from axcore.aot.chips import GIB
from axcore.aot.plan.model import Candidate, Model
from axcore.aot.plan.search import policy
from axcore.parallel import ByTag, Remat

USUAL = ByTag(save=("query", "key", "value", "heads", "gate", "up"))


class Case(NamedTuple):
    recipe: str
    target: str
    shape: dict[str, int]
    rows: int
    remat: Remat | None
    microbatches: int = 1


CASES = (
    Case("llama-1b", "gpu-h100-1", {"data": 1}, 16, USUAL),
    Case("llama-1b", "gpu-h100-2", {"fsdp": 2}, 8, None),
    Case("qwen3-0.6b", "gpu-h100-8", {"data": 8}, 16, Remat()),
    Case("llama2-7b", "gpu-h100-8", {"fsdp": 8}, 8, USUAL),
    Case("llama2-7b", "gpu-h100-8", {"fsdp": 4, "tensor": 2}, 8, ByTag(save=("heads", "lse"))),
    Case("llama2-7b", "gpu-h100-8", {"fsdp": 8}, 32, Remat(), 2),
    Case("llama3-8b", "gpu-h100-8", {"fsdp": 8}, 8, Remat()),
    Case("llama2-70b", "gpu-h100-8x64", {"fsdp": 512}, 1024, ByTag(save=("heads", "lse"))),
)


def main(numbers: list[str]) -> None:
    for case in [CASES[int(number)] for number in numbers] or CASES:
        cfg = ax.pipe(ax.recipe(case.recipe), ax.use("kernels", order=("cudnn",)))
        cfg = cfg.set(input=cfg.input.set(batch_size=case.rows))
        candidate = Candidate(case.shape, case.remat, case.microbatches)
        found = Model(cfg, Target.of(case.target)).figures(candidate).total
        expected = compile_program(candidate.applied(cfg), case.target).memory.total
        mesh = " ".join(f"{axis}={size}" for axis, size in case.shape.items())
        print(
            f"| {case.recipe} | {case.target} | {mesh} | {case.rows} | {case.microbatches} | {policy(case.remat)} "
            f"| {expected / GIB:.1f} GiB | {found / GIB:.1f} GiB | {found / expected - 1:+.1%} |",
            flush=True,
        )


main(sys.argv[1:])
