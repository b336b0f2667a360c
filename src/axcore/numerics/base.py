"""Numerics: the layer that owns how a weight is represented and multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, ConfigError
from axcore.module import Layer, Rngs, method
from axcore.numerics.gather import gather
from axcore.numerics.product import Product

type Weight = jax.Array | Mapping[str, jax.Array]
"""A float array; or, where it is stored, the arrays that `Numerics.encode` names."""


class Numerics(Layer):
    """Fills the slot `numerics` of a layer with a weight: `Linear`, `GroupedLinear` and `Embedding` of `axcore.nn`.

    The layer holds the weight, at its path `weight`, as one of two representations:

    - a float parameter, for training: `weight`;
    - with `stored=True` only what `encode` returns, for inference: `weight.codes`, `weight.scales` or the like.
      No float copy exists. `axcore.numerics.stored` converts a trained model.

    This base class computes exactly what a layer without numerics does. A subclass overrides

    - `encode` and `decode`, to have a stored representation;
    - `matrix`, if it rounds the weight while training, such as BitNet does: every product multiplies with it;
    - `__call__`, to multiply in other numbers, or to apply scales after the product;
    - `gather` and `einsum` likewise.

    State that a gradient overwrites, such as the amax history of delayed scaling, is an `axcore.module.GradientState`
    that the constructor makes. Read it once in each product, and return its next value as its cotangent.
    """

    class Config(Layer.Config):
        shape: tuple[int, ...] = REQUIRED
        """Of the weight, as the layer sees it: [in, out], [group, in, out] or [vocab, features]."""
        axes: tuple[str | None, ...] | None = None
        """Logical axes of the weight; None: replicated."""
        input_axis: int = REQUIRED
        """The axis of the weight that matrix products sum over: -2, or -1 of an embedding."""
        stored: bool = False
        """Whether the weight is held as `encode` returns it."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        """A subclass with state calls this first."""
        if cfg.stored and type(self).encode is Numerics.encode:
            raise ConfigError(f"stored=True: {type(self).__qualname__} has no stored representation; set it to False")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("gather", "einsum"):  # what draws or reports does so in the frame of this layer
            if name in cls.__dict__:
                setattr(cls, name, method(cls.__dict__[name]))

    def encode(self, weight: jax.Array) -> dict[str, jax.Array]:
        """The stored representation of a float weight [*shape]. It depends on `config` alone.

        Every array has as many dimensions as the weight, of the same size or smaller, so that a scan, a mesh and a
        gather treat them as they do the weight: codes of two in a byte are [in / 2, out], scales [1, out].
        """
        raise NotImplementedError

    def decode(self, stored: Mapping[str, jax.Array]) -> jax.Array:
        """The float32 weight [*shape] that `encode` stored, up to rounding. For an embedding it is also called with
        some rows of each array."""
        raise NotImplementedError

    def matrix(self, weight: Weight) -> jax.Array:
        """The float weight [*shape] that products multiply with. Adapters and absorbed projections see it."""
        return self.decode(weight) if isinstance(weight, Mapping) else weight

    def __call__(self, x: jax.Array, weight: Weight, product: Product) -> jax.Array:
        """The product of x with the weight, in the dtype of x or of `dtypes.accumulate`.

        Args:
            x: [..., in], in the compute dtype.
            product: how rows meet matrices, see `Product`.
        """
        return product(x, self.matrix(weight), self.dtypes.accumulate)

    @method
    def gather(self, ids: jax.Array, weight: Weight) -> jax.Array:
        """Rows of the weight in the compute dtype: int [...] -> [..., features]."""
        dtype = self.dtypes.compute or jnp.float32
        if isinstance(weight, Mapping):
            return self.decode({name: array[ids] for name, array in weight.items()}).astype(dtype)
        return gather(self.matrix(weight), ids, dtype)

    @method
    def einsum(self, equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """`jnp.einsum` of two arrays that are both computed, such as queries and keys."""
        return jnp.einsum(equation, x, y, preferred_element_type=self.dtypes.accumulate)
