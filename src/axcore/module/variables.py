"""Kinds of Variables that are no parameters."""

from __future__ import annotations

from typing import Any

from flax import nnx


class GradientState(nnx.Variable[Any]):
    """State whose next value is its gradient, such as the amax history of delayed scaling.

    A custom_vjp rule returns the new value as the cotangent of the old one. The training step differentiates the
    objective with respect to it, keeps it away from the optimizer, and stores the cotangent in its place. Over the
    microbatches of one step the largest value of each element counts.
    """
