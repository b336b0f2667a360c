"""The base of layers with one weight, which the slot `numerics` can represent and multiply by."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from axcore.config import ConfigError
from axcore.module import Layer, Rngs
from axcore.nn.initializers import Initializer
from axcore.numerics import Numerics, Product, Weight


class Weighted(Layer):
    """Base of layers with one weight, at the path `weight`."""

    class Config(Layer.Config):
        numerics: Numerics.Config | None = None
        """Represents the weight and computes every product with it; None: a float parameter and float products."""

    config: Config
    weight: nnx.Param[jax.Array] | nnx.Dict[nnx.Param[jax.Array]]
    """The float parameter, or the stored arrays by name."""

    def make_weight(
        self,
        shape: tuple[int, ...],
        init: Initializer,
        rngs: Rngs,
        *,
        axes: tuple[str | None, ...],
        input_axis: int = -2,
    ) -> None:
        """Sets the attributes `weight` and `numerics`.

        Args:
            shape: shape of the float weight.
            init: initializer of the float weight.
            axes: logical axes of the weight.
            input_axis: the axis that matrix products sum over.
        """
        widths = {"shape": shape, "axes": axes, "input_axis": input_axis}
        self.numerics = self.child("numerics", self.config.numerics, rngs, **widths)
        numerics: Numerics | None = self.numerics
        if numerics is None or not numerics.config.stored:
            self.weight = self.param("weight", shape, init, rngs, axes=axes)
            return
        # Under jit the float array is freed after it is encoded.
        made = numerics.encode(init(rngs.at("weight").use().key, shape, self.dtypes.param or jnp.float32))
        self.weight = nnx.Dict(
            {name: nnx.Param(array, axes=_axes_of(array.shape, shape, axes)) for name, array in made.items()}
        )

    @property
    def representation(self) -> Weight:
        """The float weight, or the stored arrays that replace it."""
        if isinstance(self.weight, nnx.Dict):
            return {name: variable[...] for name, variable in self.weight.items()}
        return self.float_weight

    @property
    def float_weight(self) -> Float[Array, "*shape"]:
        """The float parameter. There is none if `numerics.stored` is set."""
        assert isinstance(self.weight, nnx.Param)
        return self.weight[...]

    @property
    def base_matrix(self) -> Float[Array, "*shape"]:
        """The float weight that products use, without an adapter."""
        numerics: Numerics | None = self.numerics
        return self.float_weight if numerics is None else numerics.matrix(self.representation)

    def multiply(self, x: Float[Array, "*rows input_dim"], product: Product) -> Float[Array, "*rows output_dim"]:
        """The product of `x`, in the compute dtype, with the weight.

        Raises:
            ConfigError: the numerics return another shape, or numbers without a gradient.
        """
        numerics: Numerics | None = self.numerics
        if numerics is None:
            return product(x, self.float_weight, self.dtypes.accumulate)
        weight = self.representation
        if numerics.calibrating:
            numerics.observe(x)
            return product(
                x, numerics.matrix(weight) if isinstance(weight, Mapping) else weight, self.dtypes.accumulate
            )
        y = numerics(x, weight, product)
        outputs = None if isinstance(weight, Mapping) else weight.shape[-3 - numerics.config.input_axis]
        if _is_product(y, x.shape[:-1], outputs):
            return y
        wanted = f"[{', '.join(map(str, x.shape[:-1]))}, {'outputs' if outputs is None else outputs}]"
        found = f"{y.dtype}{list(y.shape)}" if hasattr(y, "shape") else type(y).__name__
        raise ConfigError(
            f"{self.frame.path}.numerics: {type(numerics).__name__} must return a floating-point array {wanted}, "
            f"not {found}"
        )


def _is_product(y: object, rows: tuple[int, ...], outputs: int | None) -> bool:
    """Whether `y` is a floating-point array [*rows, outputs]. None: the number of outputs is not known."""
    if not isinstance(y, jax.Array) or not jnp.issubdtype(y.dtype, jnp.floating):
        return False
    return y.shape[:-1] == rows and outputs in (None, y.shape[-1])


def _axes_of(stored: tuple[int, ...], shape: tuple[int, ...], axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """The logical axes of a stored array: those of the weight, except where the array has size 1."""
    return tuple(
        None if size == 1 and whole != 1 else axis for size, whole, axis in zip(stored, shape, axes, strict=True)
    )
