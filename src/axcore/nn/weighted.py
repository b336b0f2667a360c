"""The base of layers with a weight, which the slot `numerics` represents and multiplies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axcore.module import Layer, Rngs
from axcore.nn.initializers import Initializer
from axcore.numerics import Numerics, Product, Weight


class Weighted(Layer):
    """Base of layers with one weight, at the path `weight`."""

    class Config(Layer.Config):
        numerics: Numerics.Config | None = None
        """Represents the weight and computes every product with it; None: a float parameter and float products."""

    config: Config

    def make_weight(
        self,
        shape: tuple[int, ...],
        init: Initializer,
        rngs: Rngs,
        *,
        axes: tuple[str | None, ...],
        input_axis: int = -2,
    ) -> None:
        """Makes the attributes `weight` and `numerics`.

        Args:
            shape: shape of the float weight.
            axes: its logical axes.
            input_axis: the axis of the weight that matrix products sum over.
        """
        widths = {"shape": shape, "axes": axes, "input_axis": input_axis}
        self.numerics = self.child("numerics", self.config.numerics, rngs, **widths)
        numerics: Numerics | None = self.numerics
        if numerics is None or not numerics.config.stored:
            self.weight: Any = self.param("weight", shape, init, rngs, axes=axes)
            return
        # Under jit the float array lives only until it is encoded.
        made = numerics.encode(init(rngs.at("weight").key, shape, self.dtypes.param or jnp.float32))
        self.weight = nnx.Dict(
            {name: nnx.Param(array, axes=_axes_of(array.shape, shape, axes)) for name, array in made.items()}
        )

    @property
    def representation(self) -> Weight:
        """The float weight, or the arrays that are stored in its place."""
        if isinstance(self.weight, nnx.Dict):
            return {name: variable[...] for name, variable in self.weight.items()}
        return self.weight[...]

    @property
    def base_matrix(self) -> jax.Array:
        """The float weight that products use, without an adapter."""
        if self.numerics is None:
            matrix: jax.Array = self.weight[...]
            return matrix
        numerics: Numerics = self.numerics
        return numerics.matrix(self.representation)

    def multiply(self, x: jax.Array, product: Product) -> jax.Array:
        """The product of x, in the compute dtype, with the weight."""
        if self.numerics is None:
            return product(x, self.weight[...], self.dtypes.accumulate)
        return self.numerics(x, self.representation, product)


def _axes_of(stored: tuple[int, ...], shape: tuple[int, ...], axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """The logical axes of a stored array: those of the weight, except where the array has size 1."""
    return tuple(
        None if size == 1 and whole != 1 else axis for size, whole, axis in zip(stored, shape, axes, strict=True)
    )
