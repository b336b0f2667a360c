"""The attention calls of an engine, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import Config
from axcore.config.tree import join
from axcore.infer import Decoder, Engine, Step
from axcore.infer.engine.checks import check_config
from axcore.nn import Phase, Stack
from axcore.nn.choosing import Choice, recording
from axcore.parallel import Layout


def engine_choices(model: Config, engine: Engine.Config, layout: Layout | None) -> list[Choice]:
    """The choices of a call that decodes `max_rows` rows, of one that verifies their drafts, and of the call for each
    size of parts of prompts, with the largest page tables. Their paths are those of `model`; equal choices of several
    layers are one. Draft models are not included.

    Args:
        model: the config of the model.
        layout: the layout of the engine's device; None: that of this process.

    Raises:
        ConfigError: no layer of the model has decoding state, or the engine does not suit the model.
    """
    decoder, params, state = Decoder.abstract(
        model,
        cache=engine.cache,
        batch_size=engine.max_rows,
        max_len=engine.max_len,
        max_rollback=0 if engine.speculation is None else engine.speculation.num_speculative_tokens,
    )
    check_config(engine, decoder, has_draft_model=False)
    engine.limits(decoder)  # raises if they do not fit
    pages = None if decoder.paging is None else decoder.paging.pages_for(engine.max_len)

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

    buckets = engine.buckets(decoder)
    shapes = dict.fromkeys((*buckets.prompts, *buckets.mixed))
    decoding = dict.fromkeys((1, 1 + engine.num_drafts))
    steps = [step(engine.max_rows, width, "decode") for width in decoding]
    steps += [step(*shape, "prefill") for shape in shapes]
    with layout.active() if layout is not None else contextlib.nullcontext(), recording() as choices:
        for each in steps:
            jax.eval_shape(decoder.__call__, params, state, each)
    found = [dataclasses.replace(each, path=_stacked_path(model, each.path.split("."))) for each in choices]
    return list({(each.path, each.requests): each for each in found}.values())


def _stacked_path(cfg: Any, names: list[str]) -> str:  # Any: a node of the config
    """The path in the config of a path in `unstacked(cfg)`, whose layers are numbered."""
    if isinstance(cfg, Stack.Config) and cfg.is_sequential:
        (first, cfg), rest = list(_layers(cfg))[int(names[1])], names[2:]
    else:
        first, rest = names[0], names[1:]
        cfg = cfg[int(first)] if isinstance(cfg, tuple) else getattr(cfg, first)
    return join(first, _stacked_path(cfg, rest)) if rest else first


def _layers(stack: Stack.Config) -> Iterator[tuple[str, Config]]:
    """The path and the config of each layer that `unstacked` numbers."""
    for place in stack.places():
        if isinstance(place.config, Stack.Config) and place.config.is_sequential:
            for path, layer in _layers(place.config):
                yield join(place.config_path, path), layer
        else:
            yield place.config_path, place.config
