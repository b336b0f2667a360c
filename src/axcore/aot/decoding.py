"""The attention calls of an engine, without running it."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import Config
from axcore.infer import Decoder, Engine, Step
from axcore.infer.programs import Buckets
from axcore.nn import Phase
from axcore.nn.choosing import Choice, recording
from axcore.parallel import Layout


def engine_choices(model: Config, engine: Engine.Config, layout: Layout | None) -> list[Choice]:
    """The choices of a call that decodes `max_rows` rows, and of the call for each size of a prompt's chunk, with the
    largest page tables.

    Args:
        model: the config of the model.
        layout: the layout of the engine's device; None: that of this process.

    Raises:
        ConfigError: no layer of the model has decoding state.
    """
    decoder, params, state = Decoder.abstract(
        model, cache=engine.cache, batch_size=engine.max_rows, max_len=engine.max_len, unstack=False
    )
    paging, widest = decoder.paging, min(engine.step_tokens, engine.max_len)
    pages = None if paging is None else paging.pages_for(engine.max_len)

    def numbers(*shape: int) -> Any:  # Any: the shape of an array
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def step(rows: int, width: int, phase: Phase) -> Step:
        return Step(
            numbers(rows, width),
            start=numbers(rows),
            lengths=numbers(rows),
            slots=None if phase == "decode" and pages is None else numbers(rows),
            logits_at=numbers(rows, 1),
            pages=None if pages is None else numbers(rows, pages),
            phase=phase,
        )

    widths = Buckets.of(engine.max_rows, widest, pages, engine.page_tables).widths
    steps = [step(engine.max_rows, 1, "decode"), *(step(1, width, "prefill") for width in widths)]
    with layout.active() if layout is not None else contextlib.nullcontext(), recording() as choices:
        for each in steps:
            jax.eval_shape(decoder.__call__, params, state, each)
    return choices
