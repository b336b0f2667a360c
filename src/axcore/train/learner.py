"""The learner: optimizer, schedule and gradient clipping, over optax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axcore import config
from axcore.module import Tree
from axcore.train.schedule import Schedule, WarmupCosine

Axes = tuple[str | None, ...]


def matrices(path: str, axes: Axes) -> bool:
    """True for parameters with two dimensions or more, the stacking axis of scanned layers not counted."""
    del path
    return sum(axis != "layer" for axis in axes) >= 2


class Optimizer(config.Configurable):
    """Base of optimizers: makes the optax transformation that comes before the learning rate."""

    class Config(config.Config):
        """Fields of the optimizer."""

    def __init__(self, cfg: Any):
        self.config = cfg

    def transformation(self, axes: Tree) -> optax.GradientTransformation:
        """Gradients -> updates of unit learning rate, to be subtracted.

        Args:
            axes: the logical axes of each parameter, in the form of the parameters.
        """
        raise NotImplementedError


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2)."""

    class Config(Optimizer.Config):
        b1: float = 0.9
        b2: float = 0.95
        eps: float = 1e-8
        weight_decay: float = 0.1
        """Times the learning rate."""
        decays: Callable[[str, Axes], bool] = matrices
        """Which parameters decay, by path and logical axes."""

    def transformation(self, axes: Tree) -> optax.GradientTransformation:
        cfg = self.config

        def decays(path: Any, names: Axes) -> bool:
            return cfg.decays(jax.tree_util.keystr(path, simple=True, separator="."), names)

        mask = jax.tree_util.tree_map_with_path(decays, axes, is_leaf=lambda node: isinstance(node, tuple))
        return optax.chain(
            optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps),
            optax.add_decayed_weights(cfg.weight_decay, mask=mask),
        )


class Learner(config.Configurable):
    """Turns gradients into new parameters."""

    class Config(config.Config):
        optimizer: Optimizer.Config = AdamW.Config()
        schedule: Schedule = WarmupCosine()
        clip_norm: float | None = 1.0
        """Gradients are scaled down to this global norm; None leaves them."""
        rates: Mapping[str, float] = config.FrozenDict()
        """Path pattern -> factor of the learning rate, for parameters such as `decoder.layers.attention.**`; the last
        pattern that matches counts, and 0 freezes."""

    def __init__(self, cfg: Config, axes: Tree):
        if cfg.clip_norm is not None and not cfg.clip_norm > 0:
            raise config.ConfigError(f"learner.clip_norm must be positive or None, not {cfg.clip_norm}")
        self.config = cfg
        clip = optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm is not None else optax.identity()
        self._factors = _factors(cfg.rates, axes)
        self._optimizer = optax.chain(clip, cfg.optimizer.build().transformation(axes))

    def init(self, params: Tree) -> optax.OptState:
        return self._optimizer.init(params)

    def update(
        self, grads: Tree, state: optax.OptState, params: Tree, step: jax.Array, total_steps: jax.Array
    ) -> tuple[Tree, optax.OptState, dict[str, jax.Array]]:
        """One update.

        Returns:
            (new parameters, new optimizer state, metrics: gradient norm before clipping, learning rate).
        """
        rate = self.config.schedule(step, total_steps)
        updates, new_state = self._optimizer.update(grads, state, params)

        def apply(param: jax.Array, update: jax.Array, factor: float) -> jax.Array:
            if factor == 0.0:
                return param
            return (param - (rate if factor == 1.0 else factor * rate) * update).astype(param.dtype)

        params = jax.tree.map(apply, params, updates, self._factors)
        norm = optax.tree.norm(grads)
        return params, new_state, {"gradient_norm": norm.astype(jnp.float32), "learning_rate": rate}


def _factors(rates: Mapping[str, float], axes: Tree) -> Tree:
    """The factor of each parameter, in the form of the parameters.

    Raises:
        ConfigError: a pattern that matches no parameter.
    """
    unused = set(rates)

    def factor(path: Any, _: Axes) -> float:
        name, found = jax.tree_util.keystr(path, simple=True, separator="."), 1.0
        for pattern, value in rates.items():
            if config.matches(pattern, name):
                found = value
                unused.discard(pattern)
        return found

    factors = jax.tree_util.tree_map_with_path(factor, axes, is_leaf=lambda node: isinstance(node, tuple))
    if unused:
        raise config.ConfigError(f"learner.rates: {', '.join(sorted(unused))} matches no parameter; see `axcore tree`")
    return factors
