"""Attaches adapters to linear layers and freezes the other parameters."""

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
    """Fills the adapter slot of every selected linear layer with LoRA or DoRA.

    A second call with another `where` replaces the adapters there, for example `rank=8` everywhere, then `rank=32` for
    the queries. Adapters that wrap others in the slot stay.

    Args:
        rank: columns of A, and at most the smaller width of each weight, as for a router with few experts.
        alpha: the change of a weight is scaled by `alpha / rank`.
        dropout: probability of dropping an input feature of an adapter in training.
        dora: use DoRA, which also learns the norm of each column of a weight.
        where: which linear layers. Selected nodes without an adapter slot are ignored, so
            `"model.decoder.layers.attention.**"` selects every linear layer in attention.
        freeze: train only adapters. Sets `learner.rates` of every learner in `cfg` to
            `{"**": 0.0, ..., "**.adapter.**": 1.0}`, which keeps existing rates of 0. For a config without a learner,
            such as a model's, set these rates in its learner yourself.

    Raises:
        ConfigError: no selected node has an adapter slot, or `freeze` would override a rate above 0.
    """
    selected = list(ax.select(cfg, where))
    chosen = {path for path, node in selected if has_field(node, "adapter")}
    if not chosen:
        shown = ", ".join(path or "the root" for path, _ in selected[:3])
        raise ax.ConfigError(
            f"where={where!r} selects no linear layer, only {shown}. To select the nodes below, append '.**'."
        )
    adapter = (DoRA if dora else LoRA).Config(rank=rank, alpha=alpha, dropout=dropout)
    cfg = ax.select(cfg, lambda path, _: path in chosen).put(adapter=adapter)
    return frozen(cfg) if freeze else cfg


def frozen[C: ax.Config](cfg: C) -> C:
    """Sets the rates with which only adapters are trained; see `use_lora`.

    Raises:
        ConfigError: this would override a rate above 0.
    """
    return _on_learners(cfg, _frozen)


def unfreeze[C: ax.Config](cfg: C) -> C:
    """Removes the two rates that `freeze=True` set, where both are present."""
    return _on_learners(cfg, _unfrozen)


def _on_learners[C: ax.Config](cfg: C, edit: Any) -> C:
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
            f"rates has {moving}, but freeze=True trains only adapters. Remove those rates, or use freeze=False and "
            f"set all rates yourself, with {EVERYTHING!r}: 0.0 first and {ADAPTERS!r}: 1.0 last."
        )
    return learner.set(rates={EVERYTHING: 0.0, **others, ADAPTERS: learner.rates.get(ADAPTERS, 1.0)})


def _unfrozen(learner: Any) -> Any:
    if learner.rates.get(EVERYTHING) != 0 or ADAPTERS not in learner.rates:
        return learner
    return learner.set(rates={k: v for k, v in learner.rates.items() if k not in (EVERYTHING, ADAPTERS)})
