"""The kinds of products of activations with a weight, independent of number formats."""

from __future__ import annotations

import abc

import jax
from jax.typing import DTypeLike


class Product(abc.ABC):
    """Base of the products that layers compute: which rows of x are multiplied with which matrix of a weight.

    Subclasses are pytrees, so that a product can be an argument of a `jax.custom_vjp` function. Those of `axcore.nn`
    are `Plain` (linear maps), `Transposed` (tied heads), `Grouped` and `Batched` (grouped linear maps).
    """

    @abc.abstractmethod
    def __call__(self, x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
        """The product: [..., in] -> [..., out].

        Args:
            weight: is converted to the dtype of x. Its widths may differ from those of the layer's weight.
            accumulate: dtype of the sums and of the result; None: the dtype of x.
        """

    @abc.abstractmethod
    def broadcast(self, values: jax.Array) -> jax.Array:
        """Per-output values [out], or [group, out] or [group, 1], in a shape that broadcasts against the product."""
