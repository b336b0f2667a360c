"""Muon: orthogonalized momentum for hidden matrices, and another optimizer for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers, scale_by_muon

import axcore as ax
from axcore.module import Tree, float_dtype
from axcore.nn import Call
from axcore.train import AdamW, Learner, Optimizer, transformation_of
from axcore.train.step.learner import Axes

STACKED = ("layer", "expert")
"""Logical axes along which matrices are stacked."""


def hidden_matrices(path: str, axes: Axes) -> bool:
    """True for arrays with at least two named axes, not counting `STACKED` and excluding the vocabulary.

    Axes without a name do not count, which excludes convolutions over positions and parameters per head.
    """
    del path
    sides = [axis for axis in axes if axis is not None and axis not in STACKED]
    return len(sides) >= 2 and "vocab" not in sides


class Muon(Optimizer):
    """Momentum, orthogonalized by a Newton-Schulz iteration (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    A matrix is [..., fan_in, fan_out]: the last dimension is the output, and the dimensions before it, except `layer`
    and `expert`, are the input. Each layer of a stack and each expert is a separate matrix.
    """

    class Config(Optimizer.Config):
        momentum: ax.Fraction = 0.95
        nesterov: bool = True
        steps: ax.PositiveInt = 5
        """Newton-Schulz iterations."""
        coefficients: tuple[ax.FiniteFloat, ax.FiniteFloat, ax.FiniteFloat] = (3.4445, -4.7750, 2.0315)
        """The coefficients a, b, c of one iteration: X <- a X + (b A + c A A) X, where A = X X^T."""
        eps: ax.PositiveFloat = 1e-7
        """Added to the Frobenius norm that divides the momentum."""
        dtype: DTypeLike | None = np.dtype(jnp.bfloat16)
        """Dtype of the iteration. The default is that of the original. None uses the gradient's dtype.

        Each iteration multiplies small singular values by a, so five iterations amplify small components of a gradient,
        including rounding errors, by up to 3.4445**5 = 485. Gradients of two sharding layouts differ by about 4e-7 of
        their norm, since they are summed in different orders. In float32, the updates then differ by about 1e-5 of
        their largest value. In bfloat16, such a difference may round to the next value (4e-3), and updates differ by up
        to 1e-1 if a gradient is nearly of low rank. In a mixture of experts, the next steps then send tokens to other
        experts, and the losses of two layouts differ by 3e-3 after five steps (README, Rounding)."""
        rms: ax.PositiveFloat | None = 0.2
        """Updates are scaled by `rms * sqrt(max(fan_in, fan_out))`. Their root mean square is then about `rms`, like
        AdamW's, and both optimizers can use one learning rate (Liu et al. 2025, arXiv 2502.16982, eq. 4). None scales
        by `sqrt(max(1, fan_out / fan_in))`, as in the original, which requires a larger rate (`learner.rates`)."""
        weight_decay: ax.NonNegativeFloat = 0.1
        """Weight decay of the matrices, times the learning rate (eq. 3 of the same paper)."""
        orthogonalizes: Callable[[str, Axes], bool] = hidden_matrices
        """Selects the matrices by path and logical axes. If it selects none, for instance because LoRA freezes them
        all, `others` trains everything."""
        others: Optimizer.Config | Call = AdamW.Config()
        """The optimizer of all other parameters, or a call that returns an optax transformation."""

        def __post_init__(self) -> None:
            object.__setattr__(self, "dtype", None if self.dtype is None else float_dtype(self.dtype, "Muon.dtype"))

    config: Config

    def transformation(self, axes: Tree) -> optax.GradientTransformation:
        """See `Optimizer.transformation`.

        Raises:
            ConfigError: `orthogonalizes` selects a parameter that is not a matrix.
        """
        cfg = self.config

        def sides(path: Any, names: Axes) -> Any:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return _sides(name, names) if cfg.orthogonalizes(name, names) else optax.MaskedNode()

        # A MaskedNode has no leaves, so `matrices` has the structure of Muon's own parameters.
        matrices = jax.tree_util.tree_map_with_path(sides, axes, is_leaf=_is_tuple)
        labels = jax.tree.map(
            lambda node: "others" if isinstance(node, optax.MaskedNode) else "muon", matrices, is_leaf=_is_tuple
        )
        muon = optax.chain(
            optax.trace(cfg.momentum, cfg.nesterov),
            self._orthogonalize(matrices),
            optax.add_decayed_weights(cfg.weight_decay),
        )
        return optax.partition({"muon": muon, "others": transformation_of(cfg.others, axes)}, labels)

    def _orthogonalize(self, matrices: Tree) -> optax.GradientTransformation:
        cfg = self.config
        # With beta=0, optax's Muon is only the iteration. Its own momentum corrects the bias of its two terms
        # separately, unlike the published algorithm.
        iteration = scale_by_muon(
            cfg.coefficients, cfg.steps, beta=0.0, eps=cfg.eps, nesterov=False, weight_dimension_numbers=matrices
        )

        def scaled(update: jax.Array, matrix: jax.Array, sides: MuonDimensionNumbers) -> jax.Array:
            fan_in = math.prod(update.shape[axis] for axis in sides.reduction_axis)
            fan_out = update.shape[sides.output_axis]
            if cfg.rms is None:
                scale = math.sqrt(max(1.0, fan_out / fan_in))
            else:
                scale = cfg.rms * math.sqrt(max(fan_in, fan_out))
            return scale * matrix.astype(update.dtype)

        def orthogonal(updates: Any, params: Any) -> Any:
            del params
            low = optax.tree.cast(updates, cfg.dtype)
            done, _ = iteration.update(low, iteration.init(low))
            return jax.tree.map(scaled, updates, done, matrices)

        return optax.stateless(orthogonal)


def use_muon(cfg: ax.Config, where: ax.Where = Learner, **options: Any) -> ax.Config:
    """Trains matrices with Muon. The previous optimizer keeps the other parameters, as `Muon.Config.others`.

    Args:
        where: which learners.
        options: fields of `Muon.Config`.
    """

    def edit(_: str, learner: ax.Config) -> ax.Config:
        if not isinstance(learner, Learner.Config):
            raise ax.ConfigError("Muon requires a learner with an optimizer slot")
        if isinstance(learner.optimizer, Muon.Config):
            raise ax.ConfigError("the optimizer is already Muon. Edit its fields instead.")
        return learner.set(optimizer=Muon.Config(**{"others": learner.optimizer, **options}))

    return ax.select(cfg, where).map(edit)


def _sides(path: str, axes: Axes) -> MuonDimensionNumbers:
    sides = [index for index, axis in enumerate(axes) if axis not in STACKED]
    if len(sides) < 2:
        raise ax.ConfigError(
            f"learner.optimizer.orthogonalizes selects {path} with the axes {axes}, but Muon requires two axes besides "
            f"{' and '.join(STACKED)}"
        )
    return MuonDimensionNumbers(reduction_axis=tuple(sides[:-1]), output_axis=sides[-1])


def _is_tuple(node: Any) -> bool:
    return isinstance(node, tuple)
