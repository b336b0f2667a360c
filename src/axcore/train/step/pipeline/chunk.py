"""Chunks: consecutive layers that a stage runs in one task, and their backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from axcore.config import ConfigError
from axcore.module import Collections, Tree, to_fm32
from axcore.train.step.pipeline.parts import Hidden, Parts
from axcore.train.step.pipeline.split import Backward, Values, operations
from axcore.train.step.subtrees import subtree, union


class Variables(NamedTuple):
    """The Variables of the layers or of the rest of the model."""

    trained: Tree
    frozen: Tree
    forward_state: Tree
    """Variables other than parameters and `GradientState`, which the forward pass may write."""
    gradient_state: Tree


class Call(NamedTuple):
    """The arguments of one call of a chunk, except its Variables and its input."""

    args: tuple[PyTree, ...]
    """The further arguments of every layer."""
    first: Int[Array, ""]
    """The number of the first layer of the chunk in the stack."""
    key: PRNGKeyArray
    counts: Mapping[str, Float[Array, "layer ..."]]
    """The count of the whole batch for each loss of the layers in the chunk."""


class Gradient(NamedTuple):
    """Gradients of trained parameters, and float32 cotangents of `GradientState`, -inf before the first one."""

    trained: Tree
    gradient_state: Tree


class _Fixed(NamedTuple):
    """What a layer depends on, except its input and the Variables that layers write. It is also available in the
    backward pass, so it need not be stored."""

    trained: Tree
    gradient_state: Tree
    frozen: Tree
    forward_state: Tree
    """Variables that are written have arbitrary values here."""
    args: tuple[PyTree, ...]
    key: PRNGKeyArray
    number: Int[Array, ""]
    """The number of the layer in the stack."""
    counts: Mapping[str, Float[Array, ...]]


class _Forward(NamedTuple):
    y: Hidden
    leaves: Values
    """The values that the backward pass needs."""
    written: Values
    reports: Collections


class Chunk:
    """The forward pass of a chunk and its backward pass in two parts, for arguments of fixed shapes."""

    def __init__(self, parts: Parts, variables: Variables, x: Hidden, call: Call):
        """
        Args:
            variables: arrays [layer, ...].
            x: shapes of the input.

        Raises:
            ConfigError: the remat policy offloads values.
        """
        self.parts, self.written = parts, tuple[int, ...]()
        fixed = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], self._fixed(variables, call)))
        jax.eval_shape(self._layer, fixed, x, [])  # finds `written`
        written = leaves_at(fixed.forward_state, self.written)
        form = jax.eval_shape(self._layer, fixed, x, written)
        forward = operations(lambda *args: self._layer(*args).leaves, fixed, x, written)
        if any(getattr(leaf.aval, "memory_space", None) == jax.memory.Space.Host for leaf in forward.outputs):
            raise ConfigError(
                f"the remat policy of {parts.stack.path} offloads values to the host, but pipeline stages keep them on "
                f"the devices. Choose a policy that saves or recomputes them"
            )
        count = len(jax.tree.leaves(fixed))
        depends_on_input = forward.after(forward.inputs[count:])
        self._is_stored = forward.are_in(depends_on_input)
        recomputed = [leaf for leaf, is_stored in zip(forward.outputs, self._is_stored, strict=True) if not is_stored]
        needed = forward.before(recomputed)
        steps = [step for step in forward.steps if any(v in needed for v in step.outvars)]

        def recompute(fixed: _Fixed) -> Values:
            given = dict(zip(forward.inputs[:count], jax.tree.leaves(fixed), strict=True))
            return forward.run(given, recomputed, steps)

        self._recompute = recompute
        weights = jax.tree.leaves((fixed.trained, fixed.gradient_state))
        self._backward = Backward(operations(self._gradients, form.leaves, x), len(form.leaves), len(weights))

    def forward(self, variables: Variables, x: Hidden, call: Call) -> tuple[Hidden, Values, tuple[Values, Collections]]:
        """(output, what the backward pass needs, (new values of the written Variables, reports))."""
        own = leaves_at(variables.forward_state, self.written)

        def layer(x: Hidden, scanned: tuple[_Fixed, Values]) -> tuple[Hidden, tuple[Values, Values, Collections]]:
            found = self._layer(scanned[0], x, scanned[1])
            residuals = [leaf for leaf, is_stored in zip(found.leaves, self._is_stored, strict=True) if is_stored]
            return found.y, (residuals, found.written, found.reports)

        y, (residuals, written, reports) = jax.lax.scan(layer, x, (self._fixed(variables, call), own))
        return y, residuals, (written, reports)

    def backward(self, variables: Variables, residuals: Values, call: Call, g: Hidden) -> tuple[Hidden, Values]:
        """(gradient of the input, what `weights` needs), given the gradient of the output."""
        form = jax.tree.structure(g)

        def layer(g: Hidden, scanned: tuple[_Fixed, Values]) -> tuple[Hidden, Values]:
            gx, stash = self._backward.inputs(self._leaves(*scanned), jax.tree.leaves(g))
            return jax.tree.unflatten(form, gx), stash

        return jax.lax.scan(layer, g, (self._fixed(variables, call), residuals), reverse=True)

    def weights(self, variables: Variables, residuals: Values, call: Call, stash: Values) -> Gradient:
        """The gradients of the Variables."""
        form = jax.tree.structure(Gradient(variables.trained, variables.gradient_state))

        def layer(_: None, scanned: tuple[_Fixed, Values, Values]) -> tuple[None, Gradient]:
            fixed, residuals, stash = scanned
            return None, jax.tree.unflatten(form, self._backward.weights(self._leaves(fixed, residuals), stash))

        return jax.lax.scan(layer, None, (self._fixed(variables, call), residuals, stash))[1]

    def _fixed(self, variables: Variables, call: Call) -> _Fixed:
        """The arguments of each layer [layer, ...]."""
        count = jax.tree.leaves(variables)[0].shape[0]
        args, key = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), (call.args, call.key))
        trained, frozen, forward_state, gradient_state = variables
        return _Fixed(
            trained, gradient_state, frozen, forward_state, args, key, call.first + jnp.arange(count), call.counts
        )

    def _layer(self, fixed: _Fixed, x: Hidden, written: Values) -> _Forward:
        """One layer, and what its backward pass needs."""
        marks = self.parts.stack.divided(self.parts.fn.gradient_state)[0]

        def run(trained: Tree, gradient_state: Tree, x: Hidden) -> tuple[tuple[Hidden, jax.Array], Any]:
            old = replaced(fixed.forward_state, self.written, written)
            params, state = union(trained, fixed.frozen), union(old, gradient_state)
            y, new, reports = self.parts.layer(params, state, x, fixed.args, fixed.number, fixed.key)
            new = subtree(new, marks, lambda is_gradient_state: not is_gradient_state)
            self.written = changed(new, old)
            losses = jnp.asarray(reports.total_loss(fixed.counts), jnp.float32)
            return (y, losses), (leaves_at(new, self.written), reports)

        remat = self.parts.stack.remat
        if remat is not None:
            run = jax.checkpoint(run, policy=remat.policy(), prevent_cse=False)
        gradient_state = to_fm32(fixed.gradient_state)
        (y, _), pull, (new, reports) = jax.vjp(run, fixed.trained, gradient_state, x, has_aux=True)
        leaves, self._form = jax.tree.flatten(pull)
        return _Forward(y, leaves, new, reports)

    def _gradients(self, leaves: Values, g: Hidden) -> Values:
        """The gradients of the Variables and of the input."""
        trained, gradient_state, gx = jax.tree.unflatten(self._form, leaves)((g, jnp.ones((), jnp.float32)))
        return jax.tree.leaves((trained, as_float(gradient_state), gx))

    def _leaves(self, fixed: _Fixed, residuals: Values) -> Values:
        """All values that the backward pass needs."""
        stored, recomputed = iter(residuals), iter(self._recompute(fixed))
        return [next(stored) if is_stored else next(recomputed) for is_stored in self._is_stored]


def as_float(cotangents: Tree) -> Tree:
    """Cotangents of `GradientState` in float32."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.float32), cotangents)


def changed(new: Tree, old: Tree) -> tuple[int, ...]:
    """The numbers of the leaves that are other arrays than before."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return tuple(number for number, (new, old) in enumerate(pairs) if new is not old)


def leaves_at(tree: Tree, numbers: tuple[int, ...]) -> Values:
    """The leaves of these numbers."""
    leaves = jax.tree.leaves(tree)
    return [leaves[number] for number in numbers]


def replaced(tree: Tree, numbers: tuple[int, ...], values: Values) -> Tree:
    """The tree with other values for the leaves of these numbers."""
    leaves, structure = jax.tree.flatten(tree)
    new = dict(zip(numbers, values, strict=True))
    return jax.tree.unflatten(structure, [new.get(number, leaf) for number, leaf in enumerate(leaves)])
