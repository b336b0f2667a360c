"""What a product of activations with a weight looks like, whatever numbers it is computed in."""

from __future__ import annotations

import abc

import jax
from jax.typing import DTypeLike


class Product(abc.ABC):
    """How the rows of x meet the matrices of a weight. Subclasses are pytrees, so one may be an argument of a
    `jax.custom_vjp` function.

    `axcore.nn` has those of its layers: `Plain` (linear maps), `Transposed` (tied heads), `Grouped` and `Batched`
    (grouped linear maps).
    """

    @abc.abstractmethod
    def __call__(self, x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
        """The product: [..., in] -> [..., out].

        Args:
            weight: converted to the dtype of x. Other widths than those of the layer's weight are allowed.
            accumulate: dtype of the sums and of the result; None: that of x.
        """

    @abc.abstractmethod
    def each(self, values: jax.Array) -> jax.Array:
        """Values of each output, [out], or of each group and output, [group, out], in a form that broadcasts against
        the product. [group, 1] stands for one value a group."""
