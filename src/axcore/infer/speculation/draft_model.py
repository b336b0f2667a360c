"""Drafts of a second, smaller model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from axcore.config import ConfigError
from axcore.infer.speculation.drafter import Target
from axcore.infer.speculation.model_drafter import ModelDrafter
from axcore.module import Layer
from axcore.plugin import recipe

if TYPE_CHECKING:
    from axcore.train.run.trainer import Trainer

NUM_NEW = 2
"""The tokens of a row that the model has not computed after all drafts were accepted: the last draft, and the token
after it."""


class DraftModel(ModelDrafter):
    """Drafts the tokens that a smaller model samples with the random numbers and options of the request.

    The model has its own caches, with the rows of the engine.

    Args:
        target: the model whose tokens it predicts. `Target.draft_model` is the smaller model, unless the config names
            it.
    """

    class Config(ModelDrafter.Config):
        model: str = ""
        """A model folder, a run folder or a recipe with initial weights; empty: the argument `draft_model` of the
        engine."""
        dtype: str | None = None
        """Dtype of parameters and activations of a model that is loaded; None: the model's."""

    config: Config

    def __init__(self, cfg: Config, target: Target):
        model = _model(cfg, target)
        given = getattr(model.config, "vocab_size", None)
        if given != target.vocab_size:
            raise ConfigError(
                f"engine.speculation: the draft model has vocab_size={given}, but the model {target.vocab_size}. Use a "
                f"draft model with the same tokenizer"
            )
        super().__init__(cfg, target, model, NUM_NEW)


def _model(cfg: DraftModel.Config, target: Target) -> Layer:
    """The draft model that the config names, or that was given to the engine."""
    if bool(cfg.model) == (target.draft_model is not None):
        given = (
            f"both engine.speculation.model={cfg.model!r} and" if cfg.model else "neither engine.speculation.model nor"
        )
        raise ConfigError(f"{given} the argument draft_model of the engine name a draft model. Give one of them")
    if target.draft_model is not None:
        if cfg.dtype is not None:
            raise ConfigError(
                f"engine.speculation.dtype={cfg.dtype!r} has no effect on a draft model that is given. Set it to None"
            )
        return target.draft_model
    from axcore.infer.loading import load_model  # imports the engine, which imports this module

    name = cfg.model
    source = name if os.path.isdir(name) else cast("Trainer.Config", recipe(name))
    return load_model(source, name=name, dtype=cfg.dtype, keep_caches=False).model
