"""The learner: optimizer, schedule and gradient clipping, on top of optax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from axcore import config
from axcore.module import Tree, float_dtype
from axcore.nn.third_party import Call, label, parameters_of
from axcore.plugin import attributed
from axcore.plugin.registry import described_supplier
from axcore.train.step.schedule import Schedule, WarmupCosine
from axcore.train.step.subtrees import subtree, union

Axes = tuple[str | None, ...]


def matrices(path: str, axes: Axes) -> bool:
    """True for parameters with at least two dimensions, not counting the `layer` axis of scanned layers."""
    del path
    return sum(axis != "layer" for axis in axes) >= 2


class Optimizer(config.Configurable):
    """Base class of optimizers, which turn gradients into updates before the learning rate is applied."""

    class Config(config.Config):
        """Fields of the optimizer."""

    config: Config

    def __init__(self, cfg: Config):
        self.config = cfg

    def transformation(self, axes: Tree) -> optax.GradientTransformation:
        """The optax transformation of gradients to updates. The learner subtracts the updates times the rate.

        Args:
            axes: the logical axes of each trained parameter, as nested dicts without the frozen parameters. The
                optimizer receives neither frozen parameters nor their gradients.
        """
        raise NotImplementedError


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2).

    All arithmetic is in float32, whatever the dtype of the parameters: in bfloat16, small changes of the running
    average of squared gradients would be lost to rounding.
    """

    class Config(Optimizer.Config):
        b1: config.Fraction = 0.9
        b2: config.Fraction = 0.95
        eps: config.PositiveFloat = 1e-8
        weight_decay: config.NonNegativeFloat = 0.1
        """Multiplied by the learning rate, as in PyTorch and optax."""
        decays: Callable[[str, Axes], bool] = matrices
        """Selects the parameters that decay, by path and logical axes."""
        moment_dtype: DTypeLike = np.dtype(jnp.float32)
        """Dtype of the first moment. The second moment is float32."""

        def __post_init__(self) -> None:
            object.__setattr__(self, "moment_dtype", float_dtype(self.moment_dtype, "AdamW.moment_dtype"))

    config: Config

    def transformation(self, axes: Tree) -> optax.GradientTransformation:
        cfg = self.config

        def decays(path: KeyPath[Hashable], names: Axes) -> bool:
            return cfg.decays(jax.tree_util.keystr(path, simple=True, separator="."), names)

        mask = jax.tree_util.tree_map_with_path(decays, axes, is_leaf=lambda node: isinstance(node, tuple))
        return _in_float32(
            optax.chain(
                optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, mu_dtype=cfg.moment_dtype),
                optax.add_decayed_weights(cfg.weight_decay, mask=mask),
            )
        )


class Learner(config.Configurable):
    """Computes new parameters from gradients."""

    class Config(config.Config):
        optimizer: Optimizer.Config | Call = AdamW.Config()
        """An optimizer, or a call of a function that returns an optax transformation of gradients to updates, such as
        `axcore.call(optax.scale_by_adam, b2=0.95)`."""
        schedule: Schedule = WarmupCosine()
        clip_norm: config.PositiveFloat | None = 1.0
        """Gradients are scaled down to this global norm over all trained parameters. None: no clipping."""
        rates: Mapping[str, config.NonNegativeFloat] = config.FrozenDict()
        """Path pattern, such as `decoder.layers.attention.**` -> factor of the learning rate. The last matching pattern
        applies. The factor 0 freezes parameters: they have no gradient and no optimizer state."""

    def __init__(self, cfg: Config, axes: Tree):
        self.config = cfg
        clip = optax.stateless(functools.partial(_clipped, cfg.clip_norm))
        self._factors = _factors(cfg.rates, axes)
        self._owner = "learner.optimizer" + described_supplier(cfg.optimizer)
        with attributed(self._owner):
            transformation = transformation_of(cfg.optimizer, self.trained(axes))
        self.optimizer = optax.chain(clip, transformation)
        """The optax transformation of the trained parameters."""

    def trained(self, tree: Tree) -> Tree:
        """Selects the trained parameters from a tree with the structure of the parameters."""
        return subtree(tree, self._factors, lambda factor: factor != 0.0)

    def frozen(self, tree: Tree) -> Tree:
        """Selects the frozen parameters (factor 0) from a tree with the structure of the parameters."""
        return subtree(tree, self._factors, lambda factor: factor == 0.0)

    def init(self, params: Tree) -> optax.OptState:
        """The initial optimizer state."""
        with attributed(self._owner):
            return self.optimizer.init(self.trained(params))

    def update(
        self,
        grads: Tree,
        state: optax.OptState,
        params: Tree,
        step: Int[Array, ""],
        total_steps: Int[Array, ""],
    ) -> tuple[Tree, optax.OptState, dict[str, jax.Array]]:
        """Computes one update.

        Args:
            grads: gradients of the trained parameters; others are ignored.
            state: the optimizer state.
            params: all parameters.
            step: number of completed steps.
            total_steps: number of steps of the run.

        Returns:
            The new parameters, the new optimizer state, and the metrics `gradient_norm` (before clipping) and
            `learning_rate`.
        """
        rate = self.config.schedule(step, total_steps)
        grads, trained = self.trained(grads), self.trained(params)
        with attributed(self._owner):
            updates, new_state = self.optimizer.update(grads, state, trained)
            _check_form("updates", updates, trained)
            _check_form("the state", new_state, state)

        def apply(param: jax.Array, update: jax.Array, factor: float) -> jax.Array:
            return (param - (rate if factor == 1.0 else factor * rate) * update).astype(param.dtype)

        new_params = jax.tree.map(apply, trained, updates, self.trained(self._factors))
        metrics = {"gradient_norm": _norm(grads), "learning_rate": rate}
        return union(new_params, self.frozen(params)), new_state, metrics


def transformation_of(cfg: Optimizer.Config | Call, axes: Tree) -> optax.GradientTransformation:
    """The transformation of an optimizer, for the learner and for optimizers that contain another one. A transformation
    of optax computes in float32.

    Args:
        cfg: an optimizer, or a call that returns an optax transformation.
        axes: see `Optimizer.transformation`.

    Raises:
        ConfigError: a call returns something else, or a transformation that applies a learning rate.
    """
    if isinstance(cfg, Call) and "learning_rate" in parameters_of(cfg.function):
        raise config.ConfigError(
            f"optimizer: {label(cfg.function)} applies a learning rate, but the learner applies its schedule. Call a "
            f"transformation without one, such as optax.scale_by_adam"
        )
    built = cfg.build()
    if isinstance(built, optax.GradientTransformation):
        return _in_float32(built)
    if not isinstance(built, Optimizer):
        raise config.ConfigError(
            f"optimizer builds {type(built).__name__}. Set an Optimizer.Config or a call that returns an "
            f"optax.GradientTransformation"
        )
    made = built.transformation(axes)
    if not isinstance(made, optax.GradientTransformation):
        raise config.ConfigError(
            f"{type(built).__qualname__}.transformation must return an optax.GradientTransformation, not "
            f"{type(made).__name__}"
        )
    return made


def _check_form(what: str, found: PyTree[Array], expected: PyTree[Array]) -> None:
    """Raises unless what `update` returned has the structure and the shapes of what it was given. Without this check,
    updates of another shape would be broadcast."""
    shapes, wanted = (
        {jax.tree_util.keystr(path, simple=True, separator="."): jnp.shape(leaf) for path, leaf in leaves}
        for leaves in map(jax.tree.leaves_with_path, (found, expected))
    )
    for path in [path for path in shapes | wanted if shapes.get(path) != wanted.get(path)][:1]:
        raise config.ConfigError(
            f"update must return {what} with the structure and the shapes of its arguments, but {path} is "
            f"{shapes.get(path, 'missing')}, expected {wanted.get(path, 'none')}"
        )


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation with gradients, parameters, state and updates in float32."""

    def wide(tree: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(_wide, tree)

    def update(
        updates: PyTree[Array], state: optax.OptState, params: PyTree[Array] | None = None
    ) -> tuple[PyTree[Array], optax.OptState]:
        return inner.update(wide(updates), state, wide(params))

    return optax.GradientTransformation(lambda params: inner.init(wide(params)), update)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _norm(grads: Tree) -> Float[Array, ""]:
    """The global norm, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(_wide(grad))) for grad in jax.tree.leaves(grads)))


def _clipped(max_norm: float | None, grads: Tree, params: object) -> Tree:
    """Scales gradients down to a global norm."""
    del params
    if max_norm is None:
        return grads
    norm = _norm(grads)
    return jax.tree.map(
        lambda grad: jnp.where(norm < max_norm, grad, (_wide(grad) / norm * max_norm).astype(grad.dtype)), grads
    )


def _factors(rates: Mapping[str, float], axes: Tree) -> Tree:
    """The factor of each parameter, as a tree with the structure of the parameters.

    Raises:
        ConfigError: a pattern matches no parameter, or all parameters are frozen.
    """
    unused = set(rates)

    def factor(path: KeyPath[Hashable], _: Axes) -> float:
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
            f"learner.rates: {dict(rates)} freezes every parameter; give at least one pattern a factor above 0"
        )
    return factors
