"""Models and layouts whose steps on eight devices must equal the step on one device."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

import axcore as ax
from axcore.nn import AllToAll, MultiTokenPrediction, Normal, RingAttention, use_remat
from axcore.parallel import STANDARD_RULES, ByTag, Mesh, Remat
from axcore.parallel.pipeline import GPipe, OneForwardOneBackward, ZeroBubble
from axcore.testing.devices import Case
from axcore.testing.models import OBJECTIVE, tiny_batch, tiny_model
from axcore.train import AdamW, Learner, Trainer, WarmupStableDecay

ALL_TO_ALL, RING = AllToAll.Config(), RingAttention.Config()
SEQUENCE = {**STANDARD_RULES, "seq": ("context", "tensor")}
"""Sequence parallelism: the residual stream is sharded over the tensor axis too."""


def packed():
    batch = jax.tree.map(np.asarray, tiny_batch(rows=16))
    segments = 1 + np.cumsum(np.arange(8) % 3 == 2)[None].repeat(16, axis=0).astype(np.int32)
    weights = np.random.default_rng(0).random((16, 8)).astype(np.float32)
    return {**batch, "segment_ids": segments, "weights": weights}


def trainer(*modifiers, layers=4):
    model = ax.pipe(ax.select(tiny_model(), "decoder").set(num_layers=layers), ax.use("rope"))
    learner = Learner.Config(
        optimizer=AdamW.Config(eps=1.0), schedule=WarmupStableDecay(peak=1.0, warmup_steps=1, decay=0.0)
    )
    cfg = Trainer.Config(model=model, objective=OBJECTIVE, learner=learner, steps=1)
    return ax.pipe(cfg, *modifiers)


def tied(cfg):
    """With the usual initialization, logits are so large that float32 rounds gradients by 3e-5."""
    cfg = ax.select(cfg, "model.head").remove()
    return ax.select(cfg, "model.embedding").set(init=Normal(stddev=0.25))


def multi_token(cfg):
    layer = cfg.model.decoder.layers
    return cfg.set(model=cfg.model.set(future=(MultiTokenPrediction.Config(layer=layer),)))


def moe(**options):
    return ax.use("moe", num_experts=4, balance=0.1, z_loss=0.01, **options)


MODELS = {
    "dense": trainer(),
    "tied, remat": trainer(tied, lambda cfg: use_remat(cfg, Remat())),
    "tags, softcap": trainer(
        lambda cfg: use_remat(cfg, ByTag(save=("heads", "query"))),
        lambda cfg: ax.select(cfg, "model.decoder.layers.attention").set(softcap=5.0),
    ),
    "dropout": trainer(ax.use("dropout", rate=0.3)),
    "moe": trainer(moe()),
    "moe, dropout, remat": trainer(moe(), ax.use("dropout", rate=0.2), lambda cfg: use_remat(cfg, Remat())),
    "multi-token": trainer(multi_token),
    "lora": trainer(ax.use("lora", rank=2)),
    "cross-layer-kv": trainer(ax.use("cross-layer-kv", every=2)),
    "mamba2": trainer(ax.use("mamba2", state_dim=8, head_dim=8, chunk=4)),
}


class Composition(NamedTuple):
    model: str
    mesh: Mesh
    microbatches: int = 1


def mesh(rules=STANDARD_RULES, zero=0, memory="device", parameters=None, strategy=None, schedule=None, **shape):
    return Mesh(
        shape=shape,
        rules=rules,
        zero=zero,
        optimizer_memory=memory,
        parameters=parameters or {},
        context=strategy,
        pipeline=schedule and schedule.Config(chunks=2 if schedule is OneForwardOneBackward else 1),
    )


COMPOSITIONS = (
    Composition("dense", mesh(data=8)),
    Composition("dense", mesh(fsdp=8)),
    Composition("dense", mesh(data=2, fsdp=4), 2),
    Composition("dense", mesh(data=8, zero=1)),
    Composition("dense", mesh(data=4, fsdp=2, zero=2), 2),
    Composition("dense", mesh(fsdp=2, tensor=4)),
    Composition("dense", mesh(SEQUENCE, fsdp=2, tensor=4)),
    Composition("dense", mesh(context=4, fsdp=2)),
    Composition("dense", mesh(SEQUENCE, context=2, tensor=2, data=2, strategy=RING), 2),
    Composition("dense", mesh(data=2, fsdp=4, memory="host")),
    Composition("dense", mesh(fsdp=8, parameters={"**.norm.*": {}, "embedding.**": {"vocab": "fsdp"}})),
    Composition("tied, remat", mesh(fsdp=4, tensor=2)),
    Composition("tied, remat", mesh(SEQUENCE, data=2, tensor=4, zero=1), 2),
    Composition("tied, remat", mesh(data=2, fsdp=2, context=2, zero=2)),
    Composition("tags, softcap", mesh(fsdp=2, context=2, tensor=2)),
    Composition("dropout", mesh(fsdp=8)),
    Composition("dropout", mesh(data=2, fsdp=2, tensor=2), 2),
    Composition("dropout", mesh(SEQUENCE, context=2, tensor=4)),
    Composition("moe", mesh(data=2, expert=4)),
    Composition("moe", mesh(fsdp=2, expert=2, tensor=2)),
    Composition("moe", mesh(expert=2, context=2, tensor=2)),
    Composition("moe", mesh(data=2, expert=4, zero=2), 2),
    Composition("moe", mesh(SEQUENCE, data=2, expert=2, tensor=2, memory="host")),
    Composition("moe, dropout, remat", mesh(fsdp=4, expert=2), 2),
    Composition("multi-token", mesh(fsdp=4, tensor=2)),
    Composition("multi-token", mesh(SEQUENCE, context=2, tensor=2, fsdp=2, strategy=ALL_TO_ALL), 2),
    Composition("lora", mesh(fsdp=4, tensor=2), 2),
    Composition("lora", mesh(data=8, zero=1)),
    Composition("cross-layer-kv", mesh(fsdp=2, tensor=4)),
    Composition("cross-layer-kv", mesh(context=2, fsdp=4), 2),
    Composition("mamba2", mesh(fsdp=4, tensor=2)),
    Composition("mamba2", mesh(data=2, fsdp=2, context=2), 2),
    Composition("tags, softcap", mesh(fsdp=2, context=4, strategy=RING), 2),
    Composition("dropout", mesh(SEQUENCE, context=2, tensor=2, data=2, strategy=RING)),
    Composition("dropout", mesh(fsdp=2, context=4, strategy=ALL_TO_ALL)),
    Composition("moe", mesh(expert=2, context=2, tensor=2, strategy=RING), 2),
    Composition("moe", mesh(SEQUENCE, expert=4, context=2, zero=1, strategy=ALL_TO_ALL)),
    Composition("multi-token", mesh(data=2, fsdp=2, context=2, zero=2, strategy=RING), 2),
    Composition("cross-layer-kv", mesh(context=4, fsdp=2, strategy=RING)),
    Composition("mamba2", mesh(fsdp=2, tensor=2, context=2, strategy=ALL_TO_ALL)),
    Composition("dense", mesh(pipeline=2, fsdp=2, tensor=2), 4),
    Composition("dense", mesh(pipeline=2, data=4, zero=2), 4),
    Composition("tied, remat", mesh(SEQUENCE, pipeline=2, context=2, tensor=2, schedule=OneForwardOneBackward), 4),
    Composition("tags, softcap", mesh(pipeline=4, fsdp=2, schedule=GPipe), 4),
    Composition("dropout", mesh(pipeline=4, data=2, schedule=ZeroBubble), 4),
    Composition("moe", mesh(pipeline=2, fsdp=2, expert=2), 4),
    Composition("moe, dropout, remat", mesh(pipeline=2, expert=4, schedule=ZeroBubble), 4),
    Composition("multi-token", mesh(pipeline=2, data=4), 2),
    Composition("lora", mesh(pipeline=2, fsdp=4, memory="host"), 4),
    Composition("cross-layer-kv", mesh(pipeline=2, tensor=4), 2),
    Composition("mamba2", mesh(pipeline=2, data=2, tensor=2), 2),
    Composition("moe", mesh(fsdp=4, tensor=2), 2),
    Composition("moe", mesh(pipeline=2, data=2, fsdp=2), 4),
)


def name(composition):
    parts = [f"{axis}={size}" for axis, size in composition.mesh.shape.items()]
    parts += ["sequence"] if composition.mesh.rules == SEQUENCE else []
    parts += [composition.mesh.context.target.__name__] if composition.mesh.context is not None else []
    parts += [f"zero={composition.mesh.zero}"] if composition.mesh.zero else []
    parts += ["host"] if composition.mesh.optimizer_memory == "host" else []
    parts += [type(composition.mesh.pipeline).__qualname__.split(".")[0]] if composition.mesh.pipeline else []
    parts += ["by path"] if composition.mesh.parameters else []
    parts += [f"microbatches={composition.microbatches}"] if composition.microbatches > 1 else []
    return f"{composition.model}: {', '.join(parts)}"


def cases(compositions):
    batch = packed()
    one_device = Mesh(shape={"data": 1})
    models = {
        composition: MODELS[composition.model].set(microbatches=composition.microbatches)
        for composition in compositions
    }
    return {
        name(composition): Case(cfg.set(mesh=one_device), cfg.set(mesh=composition.mesh), batch, 8)
        for composition, cfg in models.items()
    }
