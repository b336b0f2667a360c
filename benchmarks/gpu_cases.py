"""Training runs over several GPUs: what each measures, and how."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_trace import summary

import axcore as ax
from axcore.aot import compile_program
from axcore.aot.roofline import USUAL
from axcore.nn import FeedForward
from axcore.train import Trainer
from axcore.train.checkpoint.manager import Checkpointer

PEAK = 989e12
"""Dense bfloat16 FLOP/s of an H100 or H200."""
TINY = ("model.dim=64", "model.vocab_size=512", "model.dtypes.compute=float32")
"""Overrides that shrink a model, to try a case on CPU devices, for which XLA cannot compile pipelines in bfloat16."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A training run.

    Attributes:
        recipe: the recipe of the model.
        gpus: the number of GPUs.
        rows, seq: the size of a global batch of packed rows.
        features: options of features, by name.
        microbatches: see `Trainer.Config`.
        layers: the number of layers; None: that of the recipe.
        baseline: the name of an earlier case whose speed this one is compared with, and whose losses, if the batch is
            the same.
        trace: whether to profile the device after the measurement.
    """

    recipe: str
    gpus: int
    rows: int
    seq: int = 4096
    features: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    microbatches: int = 1
    layers: int | None = None
    baseline: str | None = None
    trace: bool = True

    def config(self, *, tiny: bool = False) -> Trainer.Config:
        """The config of the trainer.

        Args:
            tiny: whether to shrink the model and the rows, for 8 CPU devices.
        """
        cfg = ax.recipe(self.recipe)
        if "moe" in self.features:
            cfg = ax.pipe(cfg, ax.use("moe", **self.features["moe"]))
        if tiny:
            cfg = ax.override(cfg, [*TINY, *_tiny_layers(cfg)])
        elif self.layers is not None:
            cfg = ax.override(cfg, [f"model.decoder.num_layers={self.layers}"])
        cfg = ax.pipe(cfg, ax.target(f"cpu-{self.gpus}" if tiny else f"gpu-h200-{self.gpus}"))
        text = ax.recipe("quickstart").input.set(batch_size=self.rows, seq_len=128 if tiny else self.seq)
        cfg = cfg.set(input=text, microbatches=self.microbatches)
        others = {name: options for name, options in self.features.items() if name != "moe"}
        cfg = ax.pipe(cfg, *(ax.use(name, **options) for name, options in others.items()))
        stacks = [path for path, node in ax.config.walk(cfg) if ax.config.has_field(node, "remat")]
        return ax.override(cfg, [f"{path}.remat=None" for path in stacks])


def _tiny_layers(cfg: Trainer.Config) -> list[str]:
    wide = [path for path, node in ax.config.walk(cfg) if isinstance(node, FeedForward.Config)]
    return ["model.decoder.num_layers=8", *(f"{path}.hidden_dim=128" for path in wide)]


def estimated(case: Case) -> dict[str, Any]:
    """The figures of `axcore aot` for a case; needs no GPU.

    Returns:
        Throughput, step and MFU of the estimate in which communication overlaps with work, and of the one in which none
        does; bytes of a GPU; and for each kind of collective its calls and the GiB that a GPU sends in a step.
    """
    cfg = case.config()
    report = compile_program(cfg, f"gpu-h200-{case.gpus}")
    estimate = report.estimate
    if estimate is None:
        return {"error": report.verdict}

    def speed(seconds: float) -> dict[str, Any]:
        tokens = report.tokens / seconds / case.gpus
        found = {"tokens_per_s_gpu": round(tokens), "step_ms": round(1e3 * seconds, 1)}
        if "moe" not in case.features:
            found["mfu"] = round(tokens * _flops_per_token(cfg, case, report.parameters) / PEAK, 4)
        return found

    collectives: dict[str, list[float]] = {}
    for each in report.collectives:
        found = collectives.setdefault(f"{each.kind} over {', '.join(each.axes)}", [0, 0])
        found[0], found[1] = found[0] + round(each.calls), round(found[1] + each.sent / 2**30, 3)
    return {
        "estimated": speed(estimate.step),
        "without_overlap": speed(estimate.without_overlap),
        "communication_ms": round(1e3 * max(estimate.link, estimate.network) / USUAL.link, 1),
        "memory_gib": round(report.memory.total / 2**30, 1),
        "fits": report.fits,
        "collectives": collectives,
        "compile_s": round(report.compile_seconds, 1),
    }


def measured(case: Case, steps: int, *, tiny: bool = False) -> dict[str, Any]:
    """Trains for some steps.

    Returns:
        Tokens/s and MFU of each GPU, which count attention without the causal mask; times; the peak memory of a GPU;
        the losses; and, if the case says so, the device time by kind of kernel.
    """
    cfg = case.config(tiny=tiny)
    made = cfg.build().program(devices=jax.devices()[: case.gpus])
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
    tokens = case.rows * cfg.input.seq_len / seconds / case.gpus
    found = {
        "tokens_per_s_gpu": round(tokens),
        "step_ms": round(1e3 * seconds, 1),
        "compile_s": round(compiling, 1),
        "peak_gib": round(peak / 2**30, 1),
        "losses": losses,
    }
    if "moe" not in case.features and not tiny:
        flops = _flops_per_token(cfg, case, sum(leaf.size for leaf in jax.tree.leaves(state.params)))
        found["mfu"] = round(tokens * flops / PEAK, 4)
    if not case.trace or tiny:
        return found

    def again() -> object:
        nonlocal state
        state, metrics = step(state, placed)
        return metrics

    traced = summary(again)
    return found | {"exposed_communication_ms": traced["exposed_collectives"], "idle_ms": traced["idle"]}


def _flops_per_token(cfg: Trainer.Config, case: Case, num_params: int) -> float:
    """Of one training step of a dense model: 6 for each weight but the embedding, 12 for each feature and key."""
    num_layers = case.layers or ax.recipe(case.recipe).model.decoder.num_layers
    used = num_params - cfg.model.vocab_size * cfg.model.dim
    return 6 * used + 12 * num_layers * cfg.model.dim * cfg.input.seq_len


def checkpointed(case: Case, folder: Path, *, tiny: bool = False) -> dict[str, Any]:
    """Trains one step, then saves the state if `folder` has no checkpoint, or else restores it to the mesh of the case.

    Returns:
        The seconds for either, and the loss of the next step, which must not depend on the mesh.
    """
    cfg = case.config(tiny=tiny)
    made = cfg.build().program(devices=jax.devices()[: case.gpus])
    first, second = itertools.islice(cfg.input.build().train_batches(), 2)
    shardings = jax.tree.map(lambda shape: shape.sharding, made.batch_shapes(first))
    step = made.compile_train(first)
    with Checkpointer.Config(asynchronous=False).build(folder) as checkpoints:
        if checkpoints.latest() is None:
            state, _ = step(made.init(jnp.uint32(0)), jax.device_put(first, shardings))
            began = time.perf_counter()
            checkpoints.save(1, jax.block_until_ready(state), data={}, meta={})
            found = {"save_s": round(time.perf_counter() - began, 1)}
        else:
            began = time.perf_counter()
            state = jax.block_until_ready(checkpoints.restore(made.state).state)
            found = {"restore_s": round(time.perf_counter() - began, 1)}
    found["gib"] = round(sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2**30, 1)
    _, metrics = step(state, jax.device_put(second, shardings))
    return found | {"next_loss": float(metrics["loss"])}
