"""Weak scaling to 32,768 chips by the planner's formulas: the table of docs/aot.md.

python benchmarks/weak_scaling.py

Each chip has the same number of tokens at every size. The layout is that of the mesh rule for the smallest size, with
more data-parallel copies. Nothing is compiled or measured.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import axcore as ax
from axcore.aot import Target
from axcore.aot.plan.model import Candidate, Model
from axcore.nn import Stack
from axcore.parallel import Mesh
from axcore.train import Trainer

HOP = 1e-6
"""Seconds for each hop between TPUs: "How to scale your model" (Austin et al. 2025), chapter 3."""
LINK, NETWORK, TREE = 3.4e-6, 9.6e-6, 50e-6
"""Seconds for each step of a ring over NVLink and over the network, and of a tree over the network: the tuning model of
NCCL for its protocol Simple (NVIDIA/nccl, src/graph/tuning.cc at 01afd20). TREE also serves slices of TPUs."""
LARGEST_SLICE = 4096
"""Chips of one v5p slice. Larger runs have several slices."""
SIZES = (256, 512, 1024, 4096, 8192, 16_384, 32_768)


class Case(NamedTuple):
    recipe: str
    kind: str
    rows: int
    """Rows of 4096 tokens on each chip."""
    smallest: int


CASES = (
    Case("llama2-7b", "tpu-v5p", 4, 256),
    Case("llama2-70b", "tpu-v5p", 2, 512),
    Case("llama2-7b", "gpu-h100", 4, 256),
    Case("llama2-70b", "gpu-h100", 2, 512),
)


def target(kind: str, chips: int) -> str:
    if kind == "gpu-h100":
        return f"{kind}-8x{chips // 8}"
    slices = math.ceil(chips / LARGEST_SLICE)
    return f"{kind}-{2 * chips // slices}" + (f"x{slices}" if slices > 1 else "")


def latency(cfg: Trainer.Config, shape: dict[str, int], found: Target) -> float:
    """Seconds of all collectives if they carried no bytes: for each layer and microbatch, two all-gathers and a
    reduce-scatter over fsdp, and an all-reduce over data."""
    copies, shards = shape["data"], shape["fsdp"]
    per_host = found.accelerator.per_host
    near = min(shards, per_host)
    if found.chip.platform == "tpu":  # along each dimension of a torus, in both directions
        ring = HOP * 3 * math.ceil(near ** (1 / 3)) / 2
        inside = min(copies, per_host // near)
        tree = 2 * HOP * 3 * math.ceil(inside ** (1 / 3)) / 2 + 2 * TREE * math.log2(copies / inside)
    else:
        hosts = shards // near
        ring = LINK * (shards - hosts) + NETWORK * (hosts - 1)
        tree = 2 * TREE * math.log2(copies)
    layers = max(len(node.places()) for _, node in ax.config.walk(cfg.model) if isinstance(node, Stack.Config))
    return cfg.microbatches * layers * (3 * ring + tree)


def main() -> None:
    print("| model | chip | chips | mesh | step | MFU | bound by | communication | latency | MFU without overlap |")
    print("|---|---|---:|---|---:|---:|---|---:|---:|---:|")
    for case in CASES:
        cfg = ax.recipe(case.recipe)
        cfg = cfg.set(input=cfg.input.set(batch_size=case.rows * case.smallest))
        cfg = ax.pipe(cfg, ax.target(target(case.kind, case.smallest)))
        remat = next(node.remat for _, node in ax.config.walk(cfg.model) if isinstance(node, Stack.Config))
        for chips in SIZES:
            if chips < case.smallest:
                continue
            found = Target.of(target(case.kind, chips))
            shape = {**cfg.mesh.shape, "data": chips // cfg.mesh.shape["fsdp"]}
            larger = cfg.set(input=cfg.input.set(batch_size=case.rows * chips), mesh=Mesh(shape=shape))
            figures = Model(larger, found).figures(Candidate(shape, remat, cfg.microbatches))
            mesh = " ".join(f"{axis}={size}" for axis, size in shape.items() if size > 1)
            delay = latency(larger, shape, found)
            communication = max(figures.link, figures.network)
            apart = figures.step + communication + delay
            print(
                f"| {case.recipe} | {case.kind} | {chips:,} | {mesh} | {figures.step:.2f} s | {figures.mfu:.1%} | "
                f"{figures.slowest} | {communication:.2f} s | {delay:.3f} s | "
                f"{figures.mfu * figures.step / apart:.1%} |",
                flush=True,
            )


main()
