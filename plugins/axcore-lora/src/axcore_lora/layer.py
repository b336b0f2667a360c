"""The adapters: a low-rank change of a weight (LoRA), optionally with learned column norms (DoRA)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import FanIn, ForEach, Initializer, Zeros
from axcore.numerics import Product


class LoRA(ax.Layer):
    """`y + alpha / rank * (x A) B` (Hu et al. 2021, arXiv 2106.09685, eq. 3), for the adapter slot of a linear layer.

    The parameters `a`, [input_dim, rank], and `b`, [rank, output_dim], are the transposes of the paper's A and B, since
    x is a row here. B starts at zero, so a new adapter changes nothing. Dropout applies to the `x` that A receives.

    With grouped weights (`axcore.nn.GroupedLinear`, as in experts), each group has its own A and B, along the first
    dimension of `a` and `b`.
    """

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        output_dim: ax.PositiveInt = ax.REQUIRED
        groups: ax.PositiveInt | None = None
        """Number of groups of a grouped weight. None means that the weight is one matrix."""
        axes: tuple[str | None, ...] | None = None
        """Logical axes of the weight."""
        rank: ax.PositiveInt = 8
        """The smaller width of the weight is used if it is less. Such an adapter can express every change."""
        alpha: ax.PositiveFloat = 16.0
        dropout: ax.Fraction = 0.0
        """Probability of dropping a feature of x in training."""
        init: Initializer = FanIn()
        """Initializer of A."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        shape, axes = self._group()
        *_, into, out_of = cfg.axes or (None, None)
        init = ForEach(init=cfg.init) if cfg.groups else cfg.init
        rank = min(cfg.rank, cfg.input_dim, cfg.output_dim)
        self.a = self.param("a", (*shape, cfg.input_dim, rank), init, rngs, axes=(*axes, into, None))
        self.b = self.param("b", (*shape, rank, cfg.output_dim), Zeros(), rngs, axes=(*axes, None, out_of))

    def _group(self) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
        """Shape and logical axes of the leading group dimension, if there is one."""
        cfg = self.config
        return ((), ()) if cfg.groups is None else ((cfg.groups,), (cfg.axes[0] if cfg.axes else None,))

    def __call__(self, x: jax.Array, y: jax.Array, weight: jax.Array, product: Product) -> jax.Array:
        """Adds the change of the weight to a product.

        Args:
            x: [..., input_dim].
            y: [..., output_dim], the product of x and the weight.
            weight: [input_dim, output_dim], or [group, input_dim, output_dim].
            product: the layer's own product of x and a matrix.

        Returns:
            The changed y, in its shape and dtype.
        """
        del weight
        return y + self.change(x, product).astype(y.dtype)

    def change(self, x: jax.Array, product: Product) -> jax.Array:
        """`alpha / rank * (x A) B`: [..., input_dim] -> [..., output_dim]."""
        cfg, accumulate = self.config, self.dtypes.accumulate
        if cfg.dropout and self.training:
            kept = jax.random.bernoulli(self.rng("dropout"), 1 - cfg.dropout, x.shape)
            x = jnp.where(kept, x / (1 - cfg.dropout), 0)
        narrow = product(x, self.a[...], accumulate).astype(x.dtype)
        return scale(cfg) * product(narrow, self.b[...], accumulate)


class DoRA(LoRA):
    """`m * x (W + sAB) / |W + sAB|`, with one magnitude m per output (Liu et al. 2024, arXiv 2402.09353, eq. 5).

    `|.|` is the norm of each column of W, [input_dim, output_dim]. As in the paper's section 4.3, the quotient of norms
    is a constant in the gradient.

    The paper's magnitude is `m = |W| * (1 + magnitude)`, where the parameter `magnitude`, [output_dim], starts at zero.
    A new adapter therefore changes nothing, even if the weights are loaded after it is built. The gradient of
    `magnitude` is |W| times the gradient of m; Adam is invariant to this factor.

    For a zero column of W, which has no direction, the change is LoRA's times `1 + magnitude`.
    """

    class Config(LoRA.Config):
        pass

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        super().__init__(cfg, rngs=rngs)
        shape, axes = self._group()
        axes = (*axes, (cfg.axes or (None,))[-1])
        self.magnitude = self.param("magnitude", (*shape, cfg.output_dim), Zeros(), rngs, axes=axes)

    def __call__(self, x: jax.Array, y: jax.Array, weight: jax.Array, product: Product) -> jax.Array:
        """Like `LoRA`, with the rescaling in float32."""
        rescale = product.broadcast(
            magnitude_scale(weight, self.a[...], self.b[...], self.magnitude[...], scale(self.config))
        )
        base = y.astype(jnp.float32)
        # A new adapter adds exact zeros, so y keeps its bits. Multiplying y by 1 lets XLA round differently.
        return (base + ((rescale - 1) * base + rescale * self.change(x, product).astype(jnp.float32))).astype(y.dtype)


def scale(cfg: LoRA.Config) -> float:
    """The factor s of AB."""
    return cfg.alpha / cfg.rank


def magnitude_scale(weight: Any, a: Any, b: Any, magnitude: Any, factor: float) -> jax.Array:
    """The factor of each output in DoRA: `|W| / |W + sAB| * (1 + magnitude)`, with no gradient through the quotient.

    `|W + sAB|^2` is computed from products with A and B. This costs one more product of rank size and creates no matrix
    as large as W. The norm of a column of W + sAB is at least about 1/3000 of the norm of the column of W.

    Args:
        weight: [..., input_dim, output_dim]. `a`, `b` and `magnitude` have the same leading dimensions.
        factor: s.

    Returns:
        float32 [..., output_dim], exactly 1 if b and magnitude are zero.
    """
    w, a, b = (jax.lax.stop_gradient(jnp.asarray(each, jnp.float32)) for each in (weight, a, b))

    def a_transposed_times(other: jax.Array) -> jax.Array:
        return jnp.matmul(jnp.swapaxes(a, -1, -2), other, precision=jax.lax.Precision.HIGHEST)

    weight_norm = jnp.square(w).sum(-2)  # squared norms of columns
    cross_term = (a_transposed_times(w) * b).sum(-2)
    change_norm = (jnp.matmul(a_transposed_times(a), b, precision=jax.lax.Precision.HIGHEST) * b).sum(-2)
    adapted_norm = weight_norm + 2 * factor * cross_term + factor**2 * change_norm
    adapted_norm = jnp.maximum(adapted_norm, jnp.finfo(jnp.float32).eps * weight_norm)
    nonzero = weight_norm > 0
    ratio = jnp.where(nonzero, jnp.sqrt(weight_norm / jnp.where(nonzero, adapted_norm, 1)), 1)
    return ratio * (1 + jnp.asarray(magnitude, jnp.float32))
