"""Chunks: consecutive layers that a stage runs in one task, and their backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from axcore.config import ConfigError
from axcore.module import Collections, Tree, to_fm32
from axcore.train.step.pipeline.indexing import at, put
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
    """The arguments of one call of a chunk, except its Variables and its input.

    Attributes:
        args: the further arguments of every layer.
        chunk: the number of the chunk on the stage.
        first: the number of its first layer in the stack.
        counts: the count of the whole batch for each loss of the layers in the stack.
        residuals, stash: the slots in these buffers.
    """

    args: tuple[PyTree, ...]
    chunk: Int[Array, ""]
    first: Int[Array, ""]
    key: PRNGKeyArray
    counts: Mapping[str, Float[Array, "layer ..."]]
    residuals: Int[Array, ""]
    stash: Int[Array, ""]


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
    """The forward pass of a chunk and its backward pass in two parts, for arguments of fixed shapes.

    Layers write their results into buffers and add their gradients to sums one layer at a time, because arrays of all
    layers would have to be copied.

    Attributes:
        residuals: the shapes of the values that the backward pass of a layer reads from its buffer.
        stash: the shapes of the values that `weights` reads from its buffer, for a layer.
        reports: the shapes of the reports of a layer.
        written: the numbers of the Variables that a layer writes.
    """

    def __init__(self, parts: Parts, variables: Variables, x: Hidden, call: Call):
        """
        Args:
            variables: arrays [chunk, layer, ...].
            x: shapes of the input.

        Raises:
            ConfigError: the remat policy offloads values.
        """
        self.parts, self.written = parts, tuple[int, ...]()
        self._num_layers = jax.tree.leaves(variables)[0].shape[1]
        fixed = jax.eval_shape(lambda: self._fixed(variables, call, jnp.int32(0)))
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
        self.residuals = self._stored(form.leaves)
        self.stash = jax.eval_shape(self._backward.inputs, form.leaves, jax.tree.leaves(x))[1]
        self.reports = form.reports

    def forward(
        self, variables: Variables, x: Hidden, call: Call, written: Values, residuals: Values
    ) -> tuple[Hidden, Values, Values, Collections]:
        """(output, new values of the written Variables, `residuals` with those of this call, reports).

        Args:
            written: the values of the written Variables [layer, ...].
            residuals: buffers [slot, layer, ...].
        """

        def layer(
            carry: tuple[Hidden, Values], scanned: tuple[Int[Array, ""], Values]
        ) -> tuple[tuple[Hidden, Values], tuple[Values, Collections]]:
            (x, residuals), (index, own) = carry, scanned
            found = self._layer(self._fixed(variables, call, index), x, own)
            residuals = put(residuals, self._stored(found.leaves), call.residuals, index)
            return (found.y, residuals), (found.written, found.reports)

        (y, residuals), (written, reports) = self._scan(layer, (x, residuals), written)
        return y, written, residuals, reports

    def backward(
        self, variables: Variables, residuals: Values, call: Call, g: Hidden, stash: Values
    ) -> tuple[Hidden, Values]:
        """(gradient of the input, `stash` with the values of this call), given the gradient of the output.

        Args:
            residuals, stash: buffers [slot, layer, ...].
        """
        form = jax.tree.structure(g)

        def layer(
            carry: tuple[Hidden, Values], scanned: tuple[Int[Array, ""], None]
        ) -> tuple[tuple[Hidden, Values], None]:
            (g, stash), (index, _) = carry, scanned
            gx, found = self._backward.inputs(self._leaves(variables, residuals, call, index), jax.tree.leaves(g))
            return (jax.tree.unflatten(form, gx), put(stash, found, call.stash, index)), None

        return self._scan(layer, (g, stash), reverse=True)[0]

    def weights(self, variables: Variables, residuals: Values, call: Call, stash: Values, sums: Gradient) -> Gradient:
        """The sums [chunk, layer, ...] with the gradients of the Variables added.

        Args:
            residuals, stash: buffers [slot, layer, ...].
        """
        form = jax.tree.structure(sums)

        def layer(sums: Gradient, scanned: tuple[Int[Array, ""], None]) -> tuple[Gradient, None]:
            index, _ = scanned
            leaves = self._leaves(variables, residuals, call, index)
            found = jax.tree.unflatten(form, self._backward.weights(leaves, at(stash, call.stash, index)))
            return put(sums, added(at(sums, call.chunk, index), *found), call.chunk, index), None

        return self._scan(layer, sums)[0]

    def _scan[C, X, Y](
        self,
        layer: Callable[[C, tuple[Int[Array, ""], X]], tuple[C, Y]],
        carry: C,
        xs: X | None = None,
        reverse: bool = False,
    ) -> tuple[C, Y]:
        """A loop over the layers of the chunk."""
        unroll = min(self.parts.stack.unroll, self._num_layers)
        scanned: Any = (jnp.arange(self._num_layers), xs)  # Any: None is a valid X
        return jax.lax.scan(layer, carry, scanned, reverse=reverse, unroll=unroll)

    def _fixed(self, variables: Variables, call: Call, index: Int[Array, ""]) -> _Fixed:
        """The arguments of a layer of the chunk."""
        trained, frozen, forward_state, gradient_state = at(variables, call.chunk, index)
        counts = at(call.counts, call.first + index)
        return _Fixed(trained, gradient_state, frozen, forward_state, call.args, call.key, call.first + index, counts)

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

    def _stored(self, leaves: Values) -> Values:
        """The values that are stored for the backward pass, among those that it needs."""
        return [leaf for leaf, is_stored in zip(leaves, self._is_stored, strict=True) if is_stored]

    def _leaves(self, variables: Variables, residuals: Values, call: Call, index: Int[Array, ""]) -> Values:
        """All values that the backward pass of a layer needs."""
        stored = iter(at(residuals, call.residuals, index))
        recomputed = iter(self._recompute(self._fixed(variables, call, index)))
        return [next(stored) if is_stored else next(recomputed) for is_stored in self._is_stored]


def added(sums: Gradient, trained: Tree, gradient_state: Tree) -> Gradient:
    """The sums with another microbatch, whose cotangents of `GradientState` may be `fm32`."""
    return Gradient(
        jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums.trained, trained),
        jax.tree.map(jnp.maximum, sums.gradient_state, as_float(gradient_state)),
    )


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
