"""The learner: optimizer, schedule and gradient clipping, over optax."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from axcore import config
from axcore.module import Tree
from axcore.train.step.parts import joined, part
from axcore.train.step.schedule import Schedule, WarmupCosine

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
            axes: the logical axes of each parameter that is trained, as nested dicts. Frozen ones are not there: the
                optimizer sees neither them nor a gradient of them.
        """
        raise NotImplementedError


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2).

    It computes in float32, whatever the dtype of the parameters: `1 - b2` of a squared gradient is below the precision
    of a bfloat16 average, which would then stop moving.
    """

    class Config(Optimizer.Config):
        b1: float = 0.9
        b2: float = 0.95
        eps: float = 1e-8
        weight_decay: float = 0.1
        """Times the learning rate."""
        decays: Callable[[str, Axes], bool] = matrices
        """Which parameters decay, by path and logical axes."""
        moment_dtype: DTypeLike = np.dtype(jnp.float32)
        """The first moment is stored in this; the second always in float32."""

        def __post_init__(self) -> None:
            try:
                object.__setattr__(self, "moment_dtype", np.dtype(self.moment_dtype))
            except TypeError:
                raise config.ConfigError(f"AdamW.moment_dtype: {self.moment_dtype!r} is not a dtype") from None

    def transformation(self, axes: Tree) -> optax.GradientTransformation:
        cfg = self.config

        def decays(path: Any, names: Axes) -> bool:
            return cfg.decays(jax.tree_util.keystr(path, simple=True, separator="."), names)

        mask = jax.tree_util.tree_map_with_path(decays, axes, is_leaf=lambda node: isinstance(node, tuple))
        return _in_float32(
            optax.chain(
                optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, mu_dtype=cfg.moment_dtype),
                optax.add_decayed_weights(cfg.weight_decay, mask=mask),
            )
        )


class Learner(config.Configurable):
    """Turns gradients into new parameters."""

    class Config(config.Config):
        optimizer: Optimizer.Config = AdamW.Config()
        schedule: Schedule = WarmupCosine()
        clip_norm: float | None = 1.0
        """Gradients are scaled down to this global norm, of all parameters that are trained; None leaves them."""
        rates: Mapping[str, float] = config.FrozenDict()
        """Path pattern -> factor of the learning rate, for parameters such as `decoder.layers.attention.**`; the last
        pattern that matches counts. 0 freezes: no gradient, no part in the norm, and no optimizer state."""

    def __init__(self, cfg: Config, axes: Tree):
        if cfg.clip_norm is not None and not cfg.clip_norm > 0:
            raise config.ConfigError(f"learner.clip_norm must be positive or None, not {cfg.clip_norm}")
        self.config = cfg
        clip = optax.stateless(functools.partial(_clipped, cfg.clip_norm))
        self._factors = _factors(cfg.rates, axes)
        self.optimizer = optax.chain(clip, cfg.optimizer.build().transformation(self.trained(axes)))
        """Of the trained parameters alone."""

    def trained(self, tree: Tree) -> Tree:
        """Of a tree in the form of the parameters, what belongs to those that are trained."""
        return part(tree, self._factors, lambda factor: factor != 0.0)

    def frozen(self, tree: Tree) -> Tree:
        """Of a tree in the form of the parameters, what belongs to those with the factor 0."""
        return part(tree, self._factors, lambda factor: factor == 0.0)

    def init(self, params: Tree) -> optax.OptState:
        return self.optimizer.init(self.trained(params))

    def update(
        self, grads: Tree, state: optax.OptState, params: Tree, step: jax.Array, total_steps: jax.Array
    ) -> tuple[Tree, optax.OptState, dict[str, jax.Array]]:
        """One update.

        Args:
            grads: of the trained parameters; others are ignored.
            state: as `init` made it.
            params: all parameters.
            step: int32 scalar, steps done.
            total_steps: int32 scalar, steps that there will be.

        Returns:
            (new parameters, new optimizer state, metrics: gradient norm before clipping, learning rate).
        """
        rate = self.config.schedule(step, total_steps)
        grads, moving = self.trained(grads), self.trained(params)
        updates, new_state = self.optimizer.update(grads, state, moving)

        def apply(param: jax.Array, update: jax.Array, factor: float) -> jax.Array:
            return (param - (rate if factor == 1.0 else factor * rate) * update).astype(param.dtype)

        moved = jax.tree.map(apply, moving, updates, self.trained(self._factors))
        metrics = {"gradient_norm": _norm(grads), "learning_rate": rate}
        return joined(moved, self.frozen(params)), new_state, metrics


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation of gradients and parameters as float32, with a state and updates of that dtype."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(_wide, tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return inner.update(wide(updates), state, wide(params))

    return optax.GradientTransformation(lambda params: inner.init(wide(params)), update)


def _wide(leaf: Any) -> Any:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _norm(grads: Tree) -> jax.Array:
    """The global norm, a float32 scalar."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(_wide(grad))) for grad in jax.tree.leaves(grads)))


def _clipped(most: float | None, grads: Tree, params: Any) -> Tree:
    """Gradients scaled down to a global norm."""
    del params
    if most is None:
        return grads
    norm = _norm(grads)
    return jax.tree.map(
        lambda grad: jnp.where(norm < most, grad, (_wide(grad) / norm * most).astype(grad.dtype)), grads
    )


def _factors(rates: Mapping[str, float], axes: Tree) -> Tree:
    """The factor of each parameter, in the form of the parameters.

    Raises:
        ConfigError: a factor that is negative or not finite, a pattern that matches no parameter, or no parameter that
            is left to train.
    """
    for pattern, value in rates.items():
        if not 0 <= value < math.inf:
            raise config.ConfigError(f"learner.rates: the factor of {pattern} must be 0 or more, not {value}")
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
    if rates and not any(jax.tree.leaves(factors)):
        raise config.ConfigError(
            f"learner.rates: {dict(rates)} freezes every parameter, and nothing is left to train; give a later pattern "
            f"a factor above 0"
        )
    return factors
