"""Random models and meshes: a step on eight devices equals the step on one device, or raises before it compiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np

import axcore as ax
from axcore.nn import AllToAll, RingAttention, use_remat
from axcore.parallel import MESH_AXES, STANDARD_RULES, ByTag, Mesh, Remat
from axcore.parallel.pipeline import GPipe, OneForwardOneBackward, ZeroBubble
from axcore.testing.devices import COUNT, Arrays, Case
from axcore.testing.models import OBJECTIVE, tiny_batch, tiny_model
from axcore.train import AdamW, Learner, Trainer, WarmupStableDecay

from .compositions import tied

SEQUENCE = {**STANDARD_RULES, "seq": ("context", "tensor")}
STRATEGIES = {"none": None, "all-to-all": AllToAll.Config(), "ring": RingAttention.Config()}
SCHEDULES = {"1f1b": OneForwardOneBackward, "gpipe": GPipe, "zero-bubble": ZeroBubble}
REMAT = {"none": None, "all": Remat(), "tags": ByTag(save=("heads", "lse"))}


class Draw(NamedTuple):
    """One example. `experts=0` is a dense model."""

    axes: tuple[tuple[str, int], ...]
    sequence: bool
    zero: int
    host: bool
    strategy: str
    schedule: str
    chunks: int
    microbatches: int
    rows: int
    seq: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int
    hidden: int
    experts: int
    tied: bool
    dropout: bool
    packed: bool
    remat: str

    @property
    def shape(self) -> dict[str, int]:
        return dict(self.axes)


def drawn(seed: int) -> Draw:
    """A random example. Most sizes fit: the axes multiply to the number of devices in nine of ten examples."""
    random = Random(seed)

    def is_one_of(count: int) -> bool:
        return random.randrange(count) == 0

    def pick(usual: Sequence[int], odd: Sequence[int]) -> int:
        return random.choice(odd if is_one_of(12) else usual)

    sizes: dict[str, int] = {}
    for factor in random.choice(([3, 2], [2, 2], [2, 2, 2, 2], [5])) if is_one_of(10) else [2, 2, 2]:
        axis = random.choice(MESH_AXES)
        sizes[axis] = sizes.get(axis, 1) * factor
    stages = sizes.get("pipeline", 1)
    heads = pick((4, 8), (2, 3, 6))
    return Draw(
        axes=tuple(sizes.items()),
        sequence=random.random() < 0.5,
        zero=random.choice((0, 0, 1, 2)),
        host=is_one_of(8),
        strategy=random.choice(tuple(STRATEGIES)) if "context" in sizes else "none",
        schedule=random.choice(tuple(SCHEDULES)),
        chunks=random.choice((1, 1, 2)) if stages > 1 else 1,
        microbatches=pick((stages, 2 * stages), (1, 3)) if stages > 1 else pick((1, 2), (3, 4)),
        rows=pick((16, 32), (12, 24)),
        seq=pick((8, 16), (6, 12)),
        heads=heads,
        kv_heads=random.choice([each for each in (1, 2, 3, 4, 8) if heads % each == 0]),
        layers=pick((4, 8), (2, 3, 6)),
        vocab=pick((32, 64), (30,)),
        hidden=pick((24, 32), (12, 18)),
        experts=random.choice((0, 4)) if "expert" not in sizes else pick((4, 8), (2, 3, 6)),
        tied=random.random() < 0.5,
        dropout=is_one_of(4),
        packed=random.random() < 0.5,
        remat=random.choice(tuple(REMAT)),
    )


def case_of(draw: Draw) -> Case:
    layer = ax.select(tiny_model(), "decoder.layers.attention").set(
        num_heads=draw.heads, num_kv_heads=draw.kv_heads, head_dim=4
    )
    model = ax.select(layer, "decoder").set(num_layers=draw.layers).set(vocab_size=draw.vocab)
    model = ax.select(model, "decoder.layers.ffn").set(hidden_dim=draw.hidden)
    model = ax.pipe(model, ax.use("rope"))
    learner = Learner.Config(
        optimizer=AdamW.Config(eps=1.0), schedule=WarmupStableDecay(peak=1.0, warmup_steps=1, decay=0.0)
    )
    cfg = Trainer.Config(model=model, objective=OBJECTIVE, learner=learner, steps=1, microbatches=draw.microbatches)
    if draw.tied:
        cfg = tied(cfg)
    if draw.experts:
        cfg = ax.pipe(cfg, ax.use("moe", num_experts=draw.experts, balance=0.1, z_loss=0.01))
    if draw.dropout:
        cfg = ax.pipe(cfg, ax.use("dropout", rate=0.2))
    if REMAT[draw.remat] is not None:
        cfg = use_remat(cfg, REMAT[draw.remat])
    mesh = Mesh(
        shape=draw.shape,
        rules=SEQUENCE if draw.sequence else STANDARD_RULES,
        zero=draw.zero,
        optimizer_memory="host" if draw.host else "device",
        context=STRATEGIES[draw.strategy],
        pipeline=SCHEDULES[draw.schedule].Config(chunks=draw.chunks) if "pipeline" in draw.shape else None,
    )
    return Case(cfg.set(mesh=Mesh(shape={"data": 1})), cfg.set(mesh=mesh), batch_of(draw), COUNT)


def batch_of(draw: Draw) -> Arrays:
    batch = {name: np.asarray(x) for name, x in tiny_batch(rows=draw.rows, seq=draw.seq).items()}
    batch |= {name: batch[name] % draw.vocab for name in ("inputs", "targets")}
    random = np.random.default_rng(0)
    batch["weights"] = random.random((draw.rows, draw.seq)).astype(np.float32)
    if draw.packed:
        batch["segment_ids"] = 1 + np.cumsum(random.random((draw.rows, draw.seq)) < 0.3, axis=1, dtype=np.int32)
    return batch


def misfits(draw: Draw) -> list[str]:
    """What the message of a refusal contains, for each reason why the step cannot run; empty if it can."""

    def size(*axes: str) -> int:
        return math.prod(draw.shape.get(axis, 1) for axis in axes)

    def dimension(length: int, *axes: str) -> tuple[bool, str]:
        listed = ", ".join(f"{axis}={size(axis)}" for axis in axes if axis in draw.shape)
        text = rf"{length} is not divisible by {size(*axes)}, .* \({listed}\)\. The nearest possible products are \d"
        return bool(length % size(*axes)), text

    stages, context, tensor = size("pipeline"), size("context"), size("tensor")
    row_shards, seq_shards = size("data", "fsdp", "expert"), context * (tensor if draw.sequence else 1)
    heads = draw.heads // tensor
    rows, prefix = row_shards * draw.microbatches, "mesh.context="
    found = [
        (size(*draw.shape) != COUNT, r"mesh.shape: \{.*\} does not match .* Set sizes whose product is 8"),
        (bool(draw.layers % (stages * draw.chunks)), rf"{draw.layers} layers, .* into {stages} stages.*change"),
        (
            1 < stages > draw.microbatches,
            rf"microbatches={draw.microbatches} .* the {stages} stages .* Set microbatches to at least {stages}",
        ),
        (
            bool(draw.rows % rows),
            rf"input.batch_size={draw.rows} .* {row_shards} devices .* Make it a multiple of {rows}",
        ),
        (
            bool(draw.seq % seq_shards),
            rf"input.seq_len={draw.seq} .* {seq_shards} devices .* Make it a multiple of {seq_shards}",
        ),
        (bool(draw.heads % tensor), rf"num_heads={draw.heads} is not a multiple of {tensor}, .*\(tensor={tensor}\)"),
        dimension(16, "fsdp", "expert", "context"),
        dimension(4 * draw.heads, "tensor"),
        dimension(4 * draw.kv_heads, "tensor"),
        dimension(draw.hidden, "tensor"),
        dimension(draw.vocab, "tensor"),
        dimension(draw.experts, "expert"),
        (
            draw.strategy == "all-to-all" and bool(heads % context),
            rf"{prefix}AllToAll with .*context={context}.* requires .* a multiple of .*, got {heads}",
        ),
        (
            draw.strategy == "ring" and draw.seq // context % 2 == 1,
            rf"{prefix}RingAttention with .*context={context}.* requires an even number of tokens on each device",
        ),
        (
            draw.strategy == "ring" and stages > 1,
            rf"ppermute inside the stages of the axis pipeline={stages}.* set mesh.context to",
        ),
    ]
    return [text for is_reason, text in found if is_reason]
