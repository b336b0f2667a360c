"""Putting adapters on linear layers, and freezing the rest."""

from __future__ import annotations

from typing import Any

import axcore as ax
from axcore.config import has_field, walk
from axcore.config.select import builds
from axcore.nn import Linear
from axcore.train import Learner
from axcore_lora.layer import DoRA, LoRA

EVERYTHING, ADAPTERS = "**", "**.adapter.**"


def use_lora(
    cfg: ax.Config,
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    dora: bool = False,
    where: ax.Where = Linear,
    freeze: bool = True,
) -> ax.Config:
    """Puts LoRA, or DoRA, into the adapter slot of every selected linear layer.

    Used again with another `where`, it replaces the adapters there: `rank=8` everywhere, then `rank=32` on the queries.

    Args:
        rank: columns of A; at most the smaller width of each weight.
        alpha: the change of a weight is scaled by `alpha / rank`.
        dropout: chance of each input feature of an adapter to be dropped while training.
        dora: DoRA, which learns the length of each column of a weight too.
        where: which linear layers. Of what a path or predicate selects, those nodes count that have an adapter slot, so
            `"model.decoder.layers.attention.**"` is every linear layer in attention.
        freeze: train adapters alone: sets `learner.rates` of every learner in `cfg` to
            `{"**": 0.0, ..., "**.adapter.**": 1.0}`, around rates of 0 that are there already. A config without a
            learner, such as a model's, is not frozen; give its learner these rates yourself.

    Raises:
        ConfigError: nothing that `where` selects has an adapter slot, or `freeze` would override a rate above 0.
    """
    selected = list(ax.select(cfg, where))
    chosen = {path for path, node in selected if has_field(node, "adapter")}
    if not chosen:
        shown = ", ".join(path or "the root" for path, _ in selected[:3])
        raise ax.ConfigError(f"where={where!r} selects no linear layer, only {shown}; for what is below, append '.**'")
    adapter = (DoRA if dora else LoRA).Config(rank=rank, alpha=alpha, dropout=dropout)
    cfg = ax.select(cfg, lambda path, _: path in chosen).set(adapter=adapter)
    return _on_learners(cfg, _frozen) if freeze else cfg


def thaw(cfg: ax.Config) -> ax.Config:
    """Takes the two rates of `freeze=True` away again, where both are."""
    return _on_learners(cfg, _thawed)


def _on_learners(cfg: ax.Config, edit: Any) -> ax.Config:
    held = any(builds(node, Learner) for _, node in walk(cfg))
    return ax.select(cfg, Learner).map(lambda _, node: edit(node)) if held else cfg


def _frozen(learner: Any) -> Any:
    others = {
        pattern: rate
        for pattern, rate in learner.rates.items()
        if pattern != ADAPTERS and (pattern, rate) != (EVERYTHING, 0)
    }
    if moving := {pattern: rate for pattern, rate in others.items() if rate > 0}:
        raise ax.ConfigError(
            f"rates has {moving}, and freeze=True would train nothing but adapters; take those rates out, or use "
            f"freeze=False and set rates to all that is to be, {EVERYTHING!r}: 0.0 first and {ADAPTERS!r}: 1.0 last"
        )
    return learner.set(rates={EVERYTHING: 0.0, **others, ADAPTERS: learner.rates.get(ADAPTERS, 1.0)})


def _thawed(learner: Any) -> Any:
    if learner.rates.get(EVERYTHING) != 0 or ADAPTERS not in learner.rates:
        return learner
    return learner.set(rates={k: v for k, v in learner.rates.items() if k not in (EVERYTHING, ADAPTERS)})
