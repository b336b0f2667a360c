"""Traces the programs that the trainer and the decoder run, for a target."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from axcore.aot.targets import Target
from axcore.config import ConfigError
from axcore.infer import Decoder, Step
from axcore.nn import ContiguousCache
from axcore.parallel import Layout
from axcore.parallel.compiler_options import Value
from axcore.parallel.pipeline import Table
from axcore.train import Trainer
from axcore.train.data.form import batch_form

ProgramName = Literal["train", "prefill", "decode"]
"""The training step; a step over whole prompts; a decoding step of one token per row."""

PROGRAMS: tuple[ProgramName, ...] = get_args(ProgramName)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program that is ready to be compiled.

    Attributes:
        tokens: the number of tokens that one run processes.
        state: the groups of arrays that persist between runs, by name, such as parameters, as shapes with shardings.
        forward: traces the forward pass alone; None if the program has no other part.
        table: the schedule of the pipeline stages; None without stages.
    """

    program: ProgramName
    layout: Layout
    traced: jax.stages.Traced
    tokens: int
    state: Mapping[str, PyTree]
    forward: Callable[[], jax.stages.Traced] | None
    compiler_options: Mapping[str, Value]
    table: Table | None = None

    def compile(self) -> jax.stages.Compiled:
        return self.traced.lower().compile(dict(self.compiler_options))


def lower(cfg: Trainer.Config, target: Target, program: ProgramName = "train") -> Lowered:
    """Traces a program of a trainer's config for a target. Computes no arrays.

    `prefill` and `decode` use a contiguous cache of `input.batch_size` rows of `input.seq_len` tokens.

    Raises:
        ConfigError: the mesh or the batch does not fit the target, the compiler of the target is not installed, or the
            program is unknown.
    """
    if program not in PROGRAMS:
        raise ConfigError(f"the program {program!r} does not exist. Known: {', '.join(PROGRAMS)}")
    if program == "train":
        return _train(cfg, target)
    return _decoding(cfg, target, program)


def _train(cfg: Trainer.Config, target: Target) -> Lowered:
    built = cfg.build().program(devices=target.devices())
    batch = batch_form(cfg.input)
    shapes, schedule = built.batch_shapes(batch), built.layout.pipeline
    return Lowered(
        program="train",
        layout=built.layout,
        traced=built.trace_train(batch),
        tokens=shapes["inputs"].size,
        state={"parameters": built.state.params, "optimizer": built.state.optimizer},
        forward=functools.partial(jax.jit(built.eval_step).trace, built.state.params, built.state.model_state, shapes),
        compiler_options=built.compiler_options,
        table=None if schedule is None else schedule.table(built.layout.stages, cfg.microbatches),
    )


def _decoding(cfg: Trainer.Config, target: Target, program: ProgramName) -> Lowered:
    rows, length = batch_form(cfg.input)["inputs"].shape
    layout = cfg.mesh.make(target.devices())
    decoder, params, state = Decoder.abstract(
        cfg.model, cache=ContiguousCache.Config(), batch_size=rows, max_len=length, layout=layout
    )
    sharding = layout.sharding("batch")

    def numbers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), jnp.int32, sharding=sharding)

    width = length if program == "prefill" else 1
    step = Step(numbers(width), numbers(), lengths=numbers(), logits_at=numbers(1), phase=program)  # type: ignore[arg-type]
    return Lowered(
        program=program,
        layout=layout,
        traced=jax.jit(decoder, donate_argnums=1).trace(params, state, step),
        tokens=rows * width,
        state={"parameters": params, "cache": state},
        forward=None,
        compiler_options={},
    )
