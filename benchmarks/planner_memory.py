"""The planner's memory against `memory_analysis()` of the whole step: a table for benchmarks/RESULTS.md.

python benchmarks/planner_memory.py TARGET ...   # of TARGETS; requires axcore[aot-cuda] and axcore[aot-tpu]

The models are small, so that each step compiles in less than a minute of CPU time. In each group, all candidates run
their layers the same way. The figure of a scanned candidate is that of the formulas, scaled by the error that they had
for the first candidate of its kind, which has the formula alone and does not count as a figure of the planner.
The figure of an unrolled candidate is extrapolated from 4 and 8 of its 16 layers. Every figure exists before its step
is compiled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import axcore as ax
from axcore.aot import Target
from axcore.aot.chips import GIB
from axcore.aot.plan.depth import FEW, MORE, memory_from_few_layers
from axcore.aot.plan.model import Candidate
from axcore.aot.plan.search import Choice, Search, layers
from axcore.parallel import ByTag, Remat
from axcore_recipes.llama import llama

HEADS = ByTag(save=("heads", "lse"))
PRODUCTS = ByTag(save=("query", "key", "value", "heads", "gate", "up"))


class Group(NamedTuple):
    """Candidates of one model that run their layers the same way: (mesh, microbatches)."""

    moe: bool
    remat: Remat | None
    unroll: bool
    candidates: tuple[tuple[dict[str, int], int], ...]


TENSOR = {"fsdp": 4, "tensor": 2}
DATA = {"data": 2, "fsdp": 4}
ONE = ({"fsdp": 8}, 1)
DENSE = (
    *(ONE, ({"fsdp": 8}, 2), ({"fsdp": 8}, 4)),
    *((DATA, 1), (DATA, 2), ({"data": 4, "fsdp": 2}, 1)),
    *((TENSOR, 1), (TENSOR, 2)),
)
MIXTURES = (
    *(({"fsdp": 4, "expert": 2}, 1), ({"fsdp": 4, "expert": 2}, 2), ({"data": 2, "fsdp": 2, "expert": 2}, 1)),
    *(ONE, ({"fsdp": 8}, 2), (DATA, 1), (DATA, 2)),
)
TARGETS: dict[str, tuple[Group, ...]] = {
    "cpu-8": (
        Group(False, None, True, (ONE,)),
        Group(False, Remat(), True, (ONE, (TENSOR, 1))),
        Group(False, HEADS, True, (ONE,)),
        Group(True, Remat(), True, (({"fsdp": 4, "expert": 2}, 1),)),
        Group(False, Remat(), False, DENSE),
        Group(False, HEADS, False, DENSE[:6]),
        Group(True, Remat(), False, MIXTURES),
        Group(False, None, False, DENSE),
        Group(True, HEADS, False, MIXTURES),
    ),
    "gpu-h100-8": (
        Group(False, Remat(), True, (ONE,)),
        Group(False, Remat(), False, DENSE),
        Group(True, Remat(), False, MIXTURES),
        Group(False, None, True, (ONE,)),
        Group(False, PRODUCTS, False, DENSE),
    ),
    "tpu-v5e-8": (
        Group(False, Remat(), False, DENSE),
        Group(True, Remat(), False, MIXTURES),
        Group(False, HEADS, False, DENSE),
    ),
}


def config(target: str, moe: bool) -> Any:
    model = llama(
        dim=1024,
        num_layers=16,
        num_heads=16,
        num_kv_heads=8,
        hidden_dim=1024 if moe else 4096,
        vocab_size=8192,
        theta=1e4,
    )
    cfg = ax.recipe("llama-1b").set(model=model)
    if target.startswith("gpu"):
        cfg = ax.pipe(cfg, ax.use("kernels", order=("cudnn",)))
    if target.startswith("tpu"):
        cfg = ax.override(cfg, ["compiler_options.optimization_level=O0"])
    if moe:
        cfg = ax.pipe(cfg, ax.use("moe", num_experts=8))
    return cfg.set(input=cfg.input.set(batch_size=32, seq_len=2048))


def figures(cfg: Any, target: str, group: Group) -> Iterator[Choice]:
    """The planner's figure of each candidate, and then that of the compiled step."""
    search = Search(cfg, Target.of(target))
    for shape, microbatches in group.candidates:
        choice = search.choice(Candidate(shape, group.remat, microbatches, group.unroll))
        formula = choice.figures.total
        if group.unroll:
            memory = memory_from_few_layers(cfg, search.target, choice.candidate, formula)
            yield Choice(choice.candidate, choice.figures, memory, f"{FEW} and {MORE} layers")
        else:
            yield choice
        search.measure(choice, whole=True)
        yield search.choice(choice.candidate)


def main(targets: list[str]) -> None:
    errors: dict[tuple[str, str], list[float]] = {}
    for target in targets or TARGETS:
        for group in TARGETS[target]:
            found, began = figures(config(target, group.moe), target, group), time.process_time()
            for choice, compiled in zip(found, found, strict=True):
                assert compiled.source == "compiled"
                mesh = " ".join(f"{axis}={size}" for axis, size in choice.candidate.shape.items())
                error, formula = (each / compiled.memory - 1 for each in (choice.memory, choice.figures.total))
                kind = "mixture" if group.moe else "dense"
                errors.setdefault((kind, choice.source), []).append(abs(error))
                seconds, began = time.process_time() - began, time.process_time()
                print(
                    f"| {target} | {kind} | {mesh} | {choice.candidate.microbatches} | {layers(choice.candidate)} "
                    f"| {compiled.memory / GIB:.2f} GiB | {formula:+.1%} | {error:+.1%} | {choice.source} "
                    f"| {seconds:.0f} s |",
                    flush=True,
                )
    for (kind, source), each in errors.items():
        print(f"{kind}, {source}: {len(each)} cases, largest error {max(each):.1%}, mean {sum(each) / len(each):.1%}")


main(sys.argv[1:])
