"""Products of activations with a weight, independent of the number format."""

from __future__ import annotations

import abc

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped


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

    def scaled(
        self,
        x: Float[Array, "*rows input_dim"],
        weight: Shaped[Array, "*shape"],
        scales: Float[Array, "*group output_dim"],
        dtype: DTypeLike,
    ) -> Float[Array, "*rows output_dim"]:
        """`self(x, weight) * broadcast(scales)`, for weights that are stored as codes with a scale for each output.

        A kernel in the slot `matmul` of a layer, such as that of axcore-gemv, multiplies the scales, too. Sums are in
        float32, and only the result is rounded.

        Args:
            x: activations.
            weight: codes, which count as they are, such as int8 or float8.
            scales: a float32 factor for each output, in the shape that `broadcast` takes.
            dtype: dtype of the result.
        """
        return (self(x, weight, jnp.float32) * self.broadcast(scales)).astype(dtype)

    @abc.abstractmethod
    def input_gradient(
        self,
        y_bar: Shaped[Array, "*rows output_dim"],
        weight: Shaped[Array, "*shape"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "*rows input_dim"]:
        """The product of `y_bar` with the transposed matrices of `weight`: the gradient of x. Like the other two
        products, it also multiplies integers, so that numerics can compute gradients in their own format."""

    @abc.abstractmethod
    def weight_gradient(
        self,
        x: Shaped[Array, "*rows input_dim"],
        y_bar: Shaped[Array, "*rows output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "*shape"]:
        """The outer products of the rows of `x` and `y_bar`, summed for each matrix: the gradient of the weight."""

    @abc.abstractmethod
    def broadcast(self, values: Float[Array, "*group output_dim"]) -> Float[Array, "*shape"]:
        """Reshapes values for each output, [out] or [group, out] or [group, 1], so that they broadcast against the
        product."""

    @abc.abstractmethod
    def largest(self, values: Float[Array, "*rows output_dim"]) -> Float[Array, "*group output_dim"]:
        """The maximum of `values` over the rows of each matrix, in the shape that `broadcast` takes."""
