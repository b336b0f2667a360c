"""The same Llama training step in axcore and in bare JAX, and a batch for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bare_llama import Shape

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, Linear, Normal, Repeat, TransformerLayer
from axcore.nn.attention.choice import recording
from axcore.parallel import ByTag, Mesh
from axcore.train import Learner
from axcore.train.step.program import Program, program


def axcore_program(shape: Shape, features: Sequence[str] = ()) -> Program:
    """The training step of axcore for these sizes, on one device."""
    linear = Linear.Config(init=Normal(stddev=0.02))
    layer = TransformerLayer.Config(
        attention=Attention.Config(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            query=linear,
            key=linear,
            value=linear,
            projection=linear,
        ),
        ffn=FeedForward.Config(hidden_dim=shape.hidden_dim, gate=linear, up=linear, down=linear),
    )
    remat = ByTag(save=shape.saved) if shape.saved is not None else None
    model = CausalLM.Config(
        vocab_size=shape.vocab_size,
        dim=shape.dim,
        dtypes=ax.DTypes(compute=shape.compute),
        decoder=Repeat.Config(num_layers=shape.num_layers, layers=layer, unroll=shape.unroll, remat=remat),
        head=linear,
    )
    model = ax.pipe(model, ax.use("rope"), *(ax.use(feature) for feature in features))
    learner = Learner.Config()
    learner = learner.set(schedule=learner.schedule.set(warmup_steps=2000))
    return program(model, learner, Mesh(shape={"data": 1}, rules={}).make(jax.devices()[:1]))


def batch(batch_size: int, seq_len: int) -> dict[str, jax.Array]:
    """The first training batch of Python's standard library: packed rows of bytes."""
    cfg = ax.recipe("quickstart").input.set(batch_size=batch_size, seq_len=seq_len, prefetch_batches=0)
    return {name: jnp.asarray(x) for name, x in next(iter(cfg.build().train_batches())).items()}


def documents_per_row(data: dict[str, jax.Array]) -> float:
    """Average number of documents per row."""
    begins = np.diff(np.asarray(data["segment_ids"]), axis=1) != 0
    return float(1 + begins.sum(axis=1).mean())


def kernels_of(program: Program, data: Any) -> str:
    """The attention kernels that the step runs for this batch."""
    with recording() as choices:
        jax.eval_shape(program.train_step, program.state, data)
    return ", ".join(sorted({type(choice.kernel).__name__ for choice in choices}))


def bare_params(params: Any) -> dict[str, Any]:
    """axcore's parameters with the names of the bare program, so that both start from the same values."""
    layers = params["decoder"]["layers"]
    attention = {name: layers["attention"][name]["weight"] for name in ("query", "key", "value", "projection")}
    ffn = {name: layers["ffn"][name]["weight"] for name in ("gate", "up", "down")}
    norms = {name: layers[name]["scale"] for name in ("attention_norm", "ffn_norm")}
    ends = {
        "embedding": params["embedding"]["weight"],
        "head": params["head"]["weight"],
        "norm": params["norm"]["scale"],
    }
    return ends | attention | ffn | norms
