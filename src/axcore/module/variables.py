"""Kinds of Variables that are no parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import fm32


class GradientState(nnx.Variable[Any]):
    """State whose next value is its gradient, such as the amax history of delayed scaling: float32, any shape.

    A custom_vjp rule returns the new value as the cotangent of the old one. The training step differentiates the
    objective with respect to it, keeps it away from the optimizer, and stores the cotangent in its place.

    Where a step reads it more than once (a layer that is called several times, an output head in chunks, microbatches)
    the largest value of each element counts. Where nothing hands it a cotangent it keeps its value.
    """

    def get_value(self, **where: Any) -> Any:
        """What a layer reads: float32, also while the training step differentiates with respect to `maxima`."""
        value = super().get_value(**where)
        return _as_float(value) if getattr(value, "dtype", None) == fm32 else value


def maxima(state: Any) -> Any:
    """The leaves of `GradientState` as a dtype whose cotangents are merged by max, to be differentiated by
    `jax.grad(..., allow_int=True)`. The dtype is that of flax's FP8 layers (`flax.linen.fp8_ops.fm32`)."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, fm32), state)


def overwritten(gradient: Any, old: Any) -> Any:
    """The next values: the gradient with respect to `maxima(old)`, and the old value of what has none."""

    def new(gradient: jax.Array, old: jax.Array) -> jax.Array:
        found = jax.lax.convert_element_type(gradient, jnp.float32)
        return jnp.where(found == -jnp.inf, old, found)

    return jax.tree.map(new, gradient, old)


@jax.custom_vjp  # jax's own rule for this conversion has no transpose
def _as_float(value: Any) -> jax.Array:
    return jax.lax.convert_element_type(value, jnp.float32)


_as_float.defvjp(
    lambda value: (_as_float(value), None), lambda _, cotangent: (jax.lax.convert_element_type(cotangent, fm32),)
)
