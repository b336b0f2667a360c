"""Products of activations with a weight, independent of the number format."""

from __future__ import annotations

import abc

from jax.typing import DTypeLike
from jaxtyping import Array, Float


class Product(abc.ABC):
    """Base of the products that layers compute: which rows of x are multiplied with which matrix of a weight.

    Subclasses are pytrees, so a product can be an argument of a `jax.custom_vjp` function. `axcore.nn` defines `Plain`
    (linear maps), `Transposed` (tied heads), `Grouped` and `Batched` (grouped linear maps).
    """

    @abc.abstractmethod
    def __call__(
        self,
        x: Float[Array, "*rows input_dim"],
        weight: Float[Array, "*shape"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "*rows output_dim"]:
        """The product of `x` with the matrices of `weight`.

        Args:
            x: activations.
            weight: float array, which is converted to the dtype of `x`. Its sizes may differ from the layer's weight.
            accumulate: dtype of the sums and of the result; None: the dtype of x.
        """

    @abc.abstractmethod
    def broadcast(self, values: Float[Array, "*group output_dim"]) -> Float[Array, "*shape"]:
        """Reshapes values for each output, [out] or [group, out] or [group, 1], so that they broadcast against the
        product."""
