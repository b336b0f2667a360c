"""A chunk: consecutive layers that a stage runs in one task, and their backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from axcore.config import ConfigError
from axcore.module import Collections, Tree, to_fm32
from axcore.train.step.parts import joined, part
from axcore.train.step.pipeline.indexing import at, put
from axcore.train.step.pipeline.parts import Hidden, Parts
from axcore.train.step.pipeline.split import Backward, Values, operations


class Variables(NamedTuple):
    """The Variables of the layers or of the rest of the model."""

    trained: Tree
    frozen: Tree
    kept: Tree
    """Variables other than parameters and `GradientState`."""
    gradient_state: Tree


class Call(NamedTuple):
    """What identifies one call of a chunk, besides its input.

    Attributes:
        args: the further arguments of every layer.
        chunk: the chunk, among those of the stage.
        first: the number of its first layer in the stack.
        counts: the count of the whole batch for each loss of the layers in the stack.
        kept, stash: the slots of these buffers.
    """

    args: tuple[PyTree, ...]
    chunk: Int[Array, ""]
    first: Int[Array, ""]
    key: PRNGKeyArray
    counts: Mapping[str, Float[Array, "layer ..."]]
    kept: Int[Array, ""]
    stash: Int[Array, ""]


class Gradient(NamedTuple):
    """Gradients of trained parameters, and cotangents of `GradientState` in float32: -inf without one."""

    trained: Tree
    gradient_state: Tree


class _Fixed(NamedTuple):
    """What a layer depends on besides its input and the Variables that layers write, so that it can be had again in the
    backward pass."""

    trained: Tree
    gradient_state: Tree
    frozen: Tree
    kept: Tree
    """The written Variables hold arbitrary values."""
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
    """The computation of a chunk, divided for one form of its arguments.

    What it keeps between tasks is written into buffers, and gradients are added to sums, a layer at a time: arrays of
    all layers would have to be copied.

    Attributes:
        kept: the shapes of what the backward pass of a layer needs.
        stash: the shapes of what `weights` needs of a layer.
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
        self._depth = jax.tree.leaves(variables)[0].shape[1]
        fixed = jax.eval_shape(lambda: self._fixed(variables, call, jnp.int32(0)))
        jax.eval_shape(self._layer, fixed, x, [])  # finds `written`
        written = [jax.tree.leaves(fixed.kept)[number] for number in self.written]
        form = jax.eval_shape(self._layer, fixed, x, written)
        forward = operations(lambda *args: self._layer(*args).leaves, fixed, x, written)
        if any(getattr(leaf.aval, "memory_space", None) == jax.memory.Space.Host for leaf in forward.outputs):
            raise ConfigError(
                f"the remat policy of {parts.stack.path} offloads values to the host, but pipeline stages keep them on "
                f"the devices. Choose a policy that saves or recomputes them"
            )
        count = len(jax.tree.leaves(fixed))
        moving = forward.after(forward.inputs[count:])
        self._is_kept = forward.are_in(moving)
        again = [leaf for leaf, is_kept in zip(forward.outputs, self._is_kept, strict=True) if not is_kept]
        needed = forward.before(again)
        steps = [step for step in forward.steps if any(v in needed for v in step.outvars)]

        def others(fixed: _Fixed) -> Values:
            given = dict(zip(forward.inputs[:count], jax.tree.leaves(fixed), strict=True))
            return forward.run(given, again, steps)

        self._others = others
        weights = jax.tree.leaves((fixed.trained, fixed.gradient_state))
        self._backward = Backward(operations(self._pulled, form.leaves, x), len(form.leaves), len(weights))
        self.kept = self._stored(form.leaves)
        self.stash = jax.eval_shape(self._backward.inputs, form.leaves, jax.tree.leaves(x))[1]
        self.reports = form.reports

    def forward(
        self, variables: Variables, x: Hidden, call: Call, written: Values, kept: Values
    ) -> tuple[Hidden, Values, Values, Collections]:
        """(output, new values of the written Variables, `kept` with what the backward pass needs, reports).

        Args:
            written: the values of the written Variables [layer, ...].
            kept: buffers [slot, layer, ...].
        """

        def layer(
            carry: tuple[Hidden, Values], scanned: tuple[Int[Array, ""], Values]
        ) -> tuple[tuple[Hidden, Values], tuple[Values, Collections]]:
            (x, kept), (index, own) = carry, scanned
            found = self._layer(self._fixed(variables, call, index), x, own)
            kept = put(kept, self._stored(found.leaves), call.kept, index)
            return (found.y, kept), (found.written, found.reports)

        (y, kept), (written, reports) = self._scan(layer, (x, kept), written)
        return y, written, kept, reports

    def backward(
        self, variables: Variables, kept: Values, call: Call, g: Hidden, stash: Values
    ) -> tuple[Hidden, Values]:
        """(gradient of the input, `stash` with what `weights` needs), given that of the output.

        Args:
            kept, stash: buffers [slot, layer, ...].
        """
        form = jax.tree.structure(g)

        def layer(
            carry: tuple[Hidden, Values], scanned: tuple[Int[Array, ""], None]
        ) -> tuple[tuple[Hidden, Values], None]:
            (g, stash), (index, _) = carry, scanned
            gx, found = self._backward.inputs(self._leaves(variables, kept, call, index), jax.tree.leaves(g))
            return (jax.tree.unflatten(form, gx), put(stash, found, call.stash, index)), None

        return self._scan(layer, (g, stash), reverse=True)[0]

    def weights(self, variables: Variables, kept: Values, call: Call, stash: Values, sums: Gradient) -> Gradient:
        """The sums [chunk, layer, ...] with the gradients of the Variables added.

        Args:
            kept, stash: buffers [slot, layer, ...].
        """

        form = jax.tree.structure(sums)

        def layer(sums: Gradient, scanned: tuple[Int[Array, ""], None]) -> tuple[Gradient, None]:
            index, _ = scanned
            leaves = self._leaves(variables, kept, call, index)
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
        unroll = min(self.parts.stack.unroll, self._depth)
        return jax.lax.scan(layer, carry, (jnp.arange(self._depth), xs), reverse=reverse, unroll=unroll)

    def _fixed(self, variables: Variables, call: Call, index: Int[Array, ""]) -> _Fixed:
        """The arguments of a layer of the chunk."""
        trained, frozen, kept, gradient_state = at(variables, call.chunk, index)
        counts = at(call.counts, call.first + index)
        return _Fixed(trained, gradient_state, frozen, kept, call.args, call.key, call.first + index, counts)

    def _layer(self, fixed: _Fixed, x: Hidden, written: Values) -> _Forward:
        """One layer, and what its backward pass needs."""
        marks = self.parts.stack.divided(self.parts.fn.gradient_state)[0]

        def run(trained: Tree, gradient_state: Tree, x: Hidden) -> tuple[tuple[Hidden, jax.Array], Any]:
            old = replaced(fixed.kept, self.written, written)
            params, state = joined(trained, fixed.frozen), joined(old, gradient_state)
            y, new, reports = self.parts.layer(params, state, x, fixed.args, fixed.number, fixed.key)
            new = part(new, marks, lambda is_gradient_state: not is_gradient_state)
            pairs = list(zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
            self.written = tuple(number for number, (new, old) in enumerate(pairs) if new is not old)
            losses = jnp.asarray(reports.total_loss(fixed.counts), jnp.float32)
            return (y, losses), ([pairs[number][0] for number in self.written], reports)

        remat = self.parts.stack.remat
        if remat is not None:
            run = jax.checkpoint(run, policy=remat.policy(), prevent_cse=False)
        gradient_state = to_fm32(fixed.gradient_state)
        (y, _), pull, (new, reports) = jax.vjp(run, fixed.trained, gradient_state, x, has_aux=True)
        leaves, self._form = jax.tree.flatten(pull)
        return _Forward(y, leaves, new, reports)

    def _pulled(self, leaves: Values, g: Hidden) -> Values:
        """The gradients of the Variables and of the input."""
        trained, gradient_state, gx = jax.tree.unflatten(self._form, leaves)((g, jnp.ones((), jnp.float32)))
        return jax.tree.leaves((trained, as_float(gradient_state), gx))

    def _stored(self, leaves: Values) -> Values:
        """Those of the values that the backward pass needs that are stored until then."""
        return [leaf for leaf, is_kept in zip(leaves, self._is_kept, strict=True) if is_kept]

    def _leaves(self, variables: Variables, kept: Values, call: Call, index: Int[Array, ""]) -> Values:
        """All values that the backward pass of a layer needs."""
        stored, others = iter(at(kept, call.kept, index)), iter(self._others(self._fixed(variables, call, index)))
        return [next(stored) if is_kept else next(others) for is_kept in self._is_kept]


def added(sums: Gradient, trained: Tree, gradient_state: Tree) -> Gradient:
    """The sums with another microbatch, whose cotangents of `GradientState` may be `fm32`."""
    return Gradient(
        jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums.trained, trained),
        jax.tree.map(jnp.maximum, sums.gradient_state, as_float(gradient_state)),
    )


def as_float(cotangents: Tree) -> Tree:
    """Cotangents of `GradientState` in float32."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.float32), cotangents)


def replaced(tree: Tree, numbers: tuple[int, ...], values: Values) -> Tree:
    """The tree with other values for the leaves of these numbers."""
    leaves, structure = jax.tree.flatten(tree)
    new = dict(zip(numbers, values, strict=True))
    return jax.tree.unflatten(structure, [new.get(number, leaf) for number, leaf in enumerate(leaves)])
