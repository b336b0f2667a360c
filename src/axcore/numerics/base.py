"""The base of the layers that represent a weight and compute products with it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from axcore.config import REQUIRED, AnyInt, ConfigError, PositiveInt
from axcore.module import Layer, Rngs, method
from axcore.numerics.gather import gather
from axcore.numerics.product import Product

type Weight = jax.Array | Mapping[str, jax.Array]
"""A float array, or the named arrays of a stored weight (see `Numerics.encode`)."""


class Numerics(Layer):
    """Base of the layers that fill the slot `numerics` of `Linear`, `GroupedLinear` and `Embedding` of `axcore.nn`.

    The weight has one of two representations:

    - for training, a float parameter `weight`;
    - with `stored=True`, for inference, only the arrays that `encode` returns, such as `weight.codes` and
      `weight.scales`, without a float copy. `axcore.numerics.stored` converts a trained model.

    The base class computes the same as a layer without numerics. A subclass overrides

    - `encode` and `decode` to define a stored representation;
    - `matrix` to round the weight while training, as BitNet does (every product uses it);
    - `__call__`, `gather` and `einsum` to compute in another number format, or to apply scales after the product.

    State that gradients overwrite, such as the amax history of delayed scaling, is an `axcore.module.GradientState`
    that the constructor creates. Each product reads it once and returns the next value as its cotangent.

    Statistics of activations that are measured once after training, such as static scales, are an
    `axcore.numerics.CalibrationState`, which `observe` updates.

    Attributes:
        calibrating: whether `axcore.numerics.calibrated` runs the model. The layer then calls `observe` and computes
            the product in floats.
    """

    calibrating: bool = False

    class Config(Layer.Config):
        shape: tuple[PositiveInt, ...] = REQUIRED
        """Shape of the float weight: [in, out], [group, in, out] or [vocab, features]."""
        axes: tuple[str | None, ...] | None = None
        """Logical axes of the weight; None replicates it."""
        input_axis: AnyInt = REQUIRED
        """The axis of the weight that matrix products sum over: -2, or -1 for an embedding."""
        stored: bool = False
        """Whether the parameters are the arrays that `encode` returns instead of a float weight."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        """Subclasses that override the constructor call it first."""
        if cfg.stored and type(self).encode is Numerics.encode:
            raise ConfigError(f"stored=True: {type(self).__qualname__} has no stored representation; set it to False")

    def __init_subclass__(cls, **kwargs: bool) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("gather", "einsum"):  # so that random numbers and reports belong to the frame of this layer
            if name in cls.__dict__:
                setattr(cls, name, method(cls.__dict__[name]))

    def encode(self, weight: Float[Array, "*shape"]) -> dict[str, jax.Array]:
        """The stored representation of a float weight. It may use `config`, but no parameters or state.

        Every array must have as many dimensions as the weight, each of the same size or smaller, so that scans, meshes
        and gathers treat it like the weight. For example, codes packed two per byte are [in / 2, out], and one scale
        per output is [1, out].
        """
        raise NotImplementedError

    def decode(self, stored: Mapping[str, jax.Array]) -> Float[Array, "*shape"]:
        """The float32 weight that `encode` stored, up to rounding. `gather` calls it with selected rows of
        each array."""
        raise NotImplementedError

    def matrix(self, weight: Weight) -> Float[Array, "*shape"]:
        """The float weight that products use. Adapters and absorbed projections use it too."""
        return self.decode(weight) if isinstance(weight, Mapping) else weight

    def observe(self, x: Float[Array, "*rows input_dim"]) -> None:
        """Includes the input of a product in each `CalibrationState`, which is -inf before the first input."""
        raise NotImplementedError

    def __call__(
        self, x: Float[Array, "*rows input_dim"], weight: Weight, product: Product
    ) -> Float[Array, "*rows output_dim"]:
        """The product of `x` with the weight, in the dtype of `x` or in `dtypes.accumulate`.

        Args:
            x: activations in the compute dtype.
            product: the kind of product, such as a plain or a grouped one.
        """
        return product(x, self.matrix(weight), self.dtypes.accumulate)

    @method
    def gather(self, ids: Int[Array, "*shape"], weight: Weight) -> Float[Array, "*shape features"]:
        """The rows `ids` of the weight, in the compute dtype."""
        dtype = self.dtypes.compute or jnp.float32
        if isinstance(weight, Mapping):
            return self.decode({name: array[ids] for name, array in weight.items()}).astype(dtype)
        return gather(self.matrix(weight), ids, dtype)

    @method
    def einsum(self, equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """`jnp.einsum` of two activations, such as queries and keys. No layer of axcore itself calls it."""
        return jnp.einsum(equation, x, y, preferred_element_type=self.dtypes.accumulate)
