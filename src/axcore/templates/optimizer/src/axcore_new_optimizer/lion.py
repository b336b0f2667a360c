"""Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

import optax

import axcore as ax
from axcore.module import Tree
from axcore.train import Optimizer


class Lion(Optimizer):
    """The sign of an interpolation between momentum and gradient; weight decay of every parameter."""

    class Config(Optimizer.Config):
        b1: ax.Fraction = 0.9
        """Weight of the momentum in the update."""
        b2: ax.Fraction = 0.99
        """Decay of the momentum."""
        weight_decay: ax.NonNegativeFloat = 0.0
        """Multiplied by the learning rate."""

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        if not (0 <= cfg.b1 < 1 and 0 <= cfg.b2 < 1):
            raise ax.ConfigError(f"b1 and b2 must be at least 0 and below 1, not {cfg.b1} and {cfg.b2}")

    def transformation(self, axes: Tree) -> optax.GradientTransformation:
        """See `Optimizer.transformation`."""
        cfg = self.config
        return optax.chain(optax.scale_by_lion(cfg.b1, cfg.b2), optax.add_decayed_weights(cfg.weight_decay))
