"""Kinds of Variables that are no parameters."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class GradientState(nnx.Variable[Any]):
    """State whose next value is its gradient, such as the amax history of delayed scaling.

    A custom_vjp rule returns the new value as the cotangent of the old one. The training step differentiates the
    objective with respect to it, keeps it away from the optimizer, and stores the cotangent in its place. Over the
    microbatches of one step the largest value of each element counts.
    """


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def largest_gradient(value: jax.Array, count: int) -> jax.Array:
    """[count, ...] copies of a `GradientState`'s value; its gradient is the largest of theirs, not the sum."""
    return jnp.broadcast_to(value, (count, *value.shape))


def _copies(value: jax.Array, count: int) -> tuple[jax.Array, None]:
    return largest_gradient(value, count), None


def _largest(count: int, residuals: None, gradients: jax.Array) -> tuple[jax.Array]:
    del count, residuals
    return (gradients.max(axis=0),)


largest_gradient.defvjp(_copies, _largest)
