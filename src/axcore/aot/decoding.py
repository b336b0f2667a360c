"""The attention calls of an engine, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import Config
from axcore.config.tree import join
from axcore.infer import Decoder, Engine, Step
from axcore.infer.engine.checks import check_config
from axcore.infer.speculation import MTP
from axcore.infer.speculation.model_drafter import WIDTHS, check_decoder
from axcore.infer.speculation.mtp import module_as_model
from axcore.module import Tree
from axcore.nn import KVCache, Phase, Stack
from axcore.nn.choosing import Choice, recording
from axcore.parallel import Layout

_MODULE = "future.0"
"""The path of the module that the drafter `MTP` runs."""


def engine_choices(model: Config, engine: Engine.Config, layout: Layout | None) -> list[Choice]:
    """The choices of a call that decodes `max_rows` rows, of one that verifies their drafts, and of the call for each
    size of parts of prompts, with the largest page tables; and those of the module of the model that the drafter `mtp`
    runs. Their paths are those of `model`; equal choices of several layers are one. Draft models are not included.

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
    if engine.speculation is not None and engine.speculation.reads_hidden_states:
        decoder = dataclasses.replace(decoder, shares_prefixes=False)  # as `keeping_hidden_states` does
    engine.limits(decoder)  # raises if they do not fit
    pages = None if decoder.paging is None else decoder.paging.pages_for(engine.max_len)
    buckets = engine.buckets(decoder)
    shapes = dict.fromkeys((*buckets.prompts, *buckets.mixed))
    decoding = dict.fromkeys((1, 1 + engine.num_drafts))
    steps = [_step(engine.max_rows, width, "decode", pages) for width in decoding]
    steps += [_step(*shape, "prefill", pages) for shape in shapes]
    found = _recorded(model, decoder, params, state, steps, layout)
    if isinstance(engine.speculation, MTP.Config):
        found += _module_choices(model, engine, engine.speculation, layout)
    return list({(each.path, each.requests): each for each in found}.values())


def cache_in(path: str, engine: Engine.Config) -> KVCache.Config | None:
    """The cache with which an engine fills an empty slot.

    Args:
        path: the path of the layer in the model.
    """
    if not path.startswith("future."):  # the engine runs none of these modules
        return engine.cache
    speculation = engine.speculation
    return speculation.cache if isinstance(speculation, MTP.Config) and path.startswith(f"{_MODULE}.") else None


def _module_choices(
    model: Config, engine: Engine.Config, speculation: MTP.Config, layout: Layout | None
) -> list[Choice]:
    """The choices of the calls of the module that drafts, and of those for parts of prompts."""
    drafts = speculation.num_speculative_tokens
    max_len = engine.max_len + drafts
    cfg = module_as_model(model, engine.max_rows, max_len)
    decoder, params, state = Decoder.abstract(
        cfg, cache=speculation.cache, batch_size=engine.max_rows, max_len=max_len, max_rollback=drafts
    )
    check_decoder(speculation, decoder, engine.max_len)
    steps = [_step(engine.max_rows, width, "decode") for width in (speculation.num_new, 1)]
    steps += [_step(1, width, "prefill") for width in WIDTHS]
    found = _recorded(cfg, decoder, params, state, steps, layout)
    return [dataclasses.replace(each, path=each.path.replace("decoder.module", _MODULE, 1)) for each in found]


def _step(rows: int, width: int, phase: Phase, pages: int | None = None) -> Step:
    """The shapes of a step. `pages` is the width of the page tables."""

    def numbers(*shape: int) -> Any:  # Any: the shape of an array
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return Step(
        numbers(rows, width),
        start=numbers(rows),
        lengths=numbers(rows),
        slots=None if phase == "decode" and pages is None else numbers(rows),
        logits_at=numbers(rows, 1),
        pages=None if pages is None else numbers(rows, pages),
        phase=phase,
    )


def _recorded(
    cfg: Config, decoder: Decoder, params: Tree, state: Tree, steps: Iterable[Step], layout: Layout | None
) -> list[Choice]:
    """The choices of steps of a decoder, with their paths in the config of its model."""
    with layout.active() if layout is not None else contextlib.nullcontext(), recording() as choices:
        for step in steps:
            jax.eval_shape(decoder.__call__, params, state, step)
    return [dataclasses.replace(each, path=_stacked_path(cfg, each.path.split("."))) for each in choices]


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
