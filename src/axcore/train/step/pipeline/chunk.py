"""A chunk: consecutive layers that a stage runs in one task, and their backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from axcore.module import Collections, Tree, to_fm32
from axcore.train.step.parts import joined, part
from axcore.train.step.pipeline.parts import Hidden, Parts


class Variables(NamedTuple):
    """The Variables of the layers or of the rest of the model."""

    trained: Tree
    frozen: Tree
    kept: Tree
    """Variables other than parameters and `GradientState`."""
    gradient_state: Tree


class Call(NamedTuple):
    """What identifies one call of a chunk, besides its Variables and its input."""

    args: tuple[PyTree, ...]
    """The further arguments of every layer."""
    first: Int[Array, ""]
    """The number of the first layer of the chunk in the stack."""
    key: PRNGKeyArray
    counts: Mapping[str, Float[Array, "layer ..."]]
    """The count of the whole batch for each loss of the layers in the chunk."""


class Gradient(NamedTuple):
    """Gradients of trained parameters, and cotangents of `GradientState` in float32: -inf without one."""

    trained: Tree
    gradient_state: Tree


@dataclasses.dataclass
class Chunk:
    """The computation of a chunk.

    Attributes:
        parts: the model.
        written: the leaves of `Variables.kept` that layers write, by index; known after the first call.
    """

    parts: Parts
    written: tuple[int, ...] = ()

    def forward(
        self, variables: Variables, x: Hidden, call: Call
    ) -> tuple[tuple[Hidden, Float[Array, ""]], tuple[list[jax.Array], Collections]]:
        """((output, losses of the layers), (new values of the written Variables, reports)).

        Args:
            variables: arrays [layer, ...]. `GradientState` may be `fm32`.
        """
        marks = self.parts.stack.divided(self.parts.fn.gradient_state)[0]
        remat = self.parts.stack.remat

        def layer(
            x: Hidden, scanned: tuple[Int[Array, ""], Variables]
        ) -> tuple[Hidden, tuple[list[jax.Array], Collections]]:
            index, own = scanned
            params, state = joined(own.trained, own.frozen), joined(own.kept, own.gradient_state)
            y, new, reports = self.parts.layer(params, state, x, call.args, index, call.key)
            kept = part(new, marks, lambda is_gradient_state: not is_gradient_state)
            pairs = list(zip(jax.tree.leaves(kept), jax.tree.leaves(own.kept), strict=True))
            self.written = tuple(number for number, (new, old) in enumerate(pairs) if new is not old)
            return y, ([pairs[number][0] for number in self.written], reports)

        if remat is not None:
            layer = jax.checkpoint(layer, policy=remat.policy(), prevent_cse=False)
        count = jax.tree.leaves(variables)[0].shape[0]
        y, (written, reports) = jax.lax.scan(layer, x, (call.first + jnp.arange(count), variables))
        losses = jnp.asarray(reports.total_loss(call.counts), jnp.float32)
        return (y, losses), (written, reports)

    def backward(self, variables: Variables, x: Hidden, call: Call, g: Hidden) -> tuple[Hidden, Gradient]:
        """(gradient of the input, gradients of the Variables), given that of the output."""

        def run(trained: Tree, gradient_state: Tree, x: Hidden) -> tuple[Hidden, Float[Array, ""]]:
            own = variables._replace(trained=trained, gradient_state=gradient_state)
            return self.forward(own, x, call)[0]

        (_, losses), pull = jax.vjp(run, variables.trained, to_fm32(variables.gradient_state), x)
        trained, gradient_state, gx = pull((g, jnp.ones_like(losses)))
        return gx, Gradient(trained, as_float(gradient_state))


def as_float(cotangents: Tree) -> Tree:
    """Cotangents of `GradientState` in float32."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.float32), cotangents)
