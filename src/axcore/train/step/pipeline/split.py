"""Divides the backward pass of a layer by dataflow into two parts: the gradient of the input, and those of the weights.

Layers and kernels need no changes, because the flat list of operations that JAX derives is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from axcore.train.step.equations import Equation, bind

_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2")
"""Operations that only call others."""
Atom = Any  # Any: the variables and literals of a jaxpr have no public base class
Values = list[jax.Array]


class Operations(NamedTuple):
    """A function of arrays as a list of operations.

    Attributes:
        inputs, outputs: variables, and literals among the outputs.
        known: the values of constants.
        steps: the operations, without calls.
    """

    inputs: list[Atom]
    outputs: list[Atom]
    known: Mapping[Atom, Any]
    steps: list[Equation]

    def after(self, variables: Iterable[Atom]) -> set[Atom]:
        """These variables and all variables that depend on them."""
        found = set(variables)
        for step in self.steps:
            if any(v in found for v in _variables(step.invars)):
                found.update(step.outvars)
        return found

    def before(self, variables: Iterable[Atom]) -> set[Atom]:
        """These variables and all variables that they depend on."""
        found = set(_variables(variables))
        for step in reversed(self.steps):
            if any(v in found for v in step.outvars):
                found.update(_variables(step.invars))
        return found

    def are_in(self, variables: set[Atom]) -> list[bool]:
        """Whether each output is one of the variables."""
        return [not isinstance(atom, Literal) and atom in variables for atom in self.outputs]

    def run(self, given: Mapping[Atom, Any], wanted: Sequence[Atom], steps: Sequence[Any]) -> Values:
        """The wanted values, computed by `steps` from the given values."""
        values: dict[Atom, Any] = {**self.known, **given}

        def read(atom: Atom) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for step in steps:
            values.update(zip(step.outvars, bind(step, [*map(read, step.invars)]), strict=True))
        return [read(atom) for atom in wanted]


def operations(fn: Callable[..., Any], *likes: Any) -> Operations:
    """The operations of a function of pytrees that returns a list of arrays.

    Args:
        likes: arguments, whose leaves may be shapes.
    """
    leaves, structure = jax.tree.flatten(likes)
    traced = jax.make_jaxpr(lambda *leaves: fn(*jax.tree.unflatten(structure, leaves)))(*leaves)
    flat = jax.make_jaxpr(lambda *leaves: _inlined(traced, leaves))(*leaves)
    known = dict(zip(flat.constvars, flat.consts, strict=True)) if flat.constvars else {}
    return Operations(list(flat.invars), list(flat.outvars), known, list(flat.eqns))


def _inlined(jaxpr: Any, arguments: Iterable[Any]) -> list[Any]:  # Any: see Operations
    values = dict(zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for step in jaxpr.eqns:
        given = [read(atom) for atom in step.invars]
        is_call = step.primitive.name in _CALLS
        results = _inlined(step.params["jaxpr"], given) if is_call else bind(step, given)
        values.update(zip(step.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _variables(atoms: Iterable[Atom]) -> list[Atom]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


class Backward:
    """A backward pass `(leaves, g) -> [gradients of weights, gradients of the input]` in two parts.

    Operations that depend on `g` and are not needed for the gradient of the input belong to `weights`. An operation
    that both gradients need belongs to `inputs`.
    """

    def __init__(self, operations: Operations, num_leaves: int, num_weights: int):
        """`num_leaves` and `num_weights` are the numbers of the first arguments and of the first results."""
        self._all, self._num_weights = operations, num_weights
        self._leaves, self._g = operations.inputs[:num_leaves], operations.inputs[num_leaves:]
        after_g = operations.after(self._g)
        for_input = operations.before(operations.outputs[num_weights:])
        late = [
            any(v in after_g for v in step.outvars) and not any(v in for_input for v in step.outvars)
            for step in operations.steps
        ]
        self._early = [step for step, is_late in zip(operations.steps, late, strict=True) if not is_late]
        self._late = [step for step, is_late in zip(operations.steps, late, strict=True) if is_late]
        read = {v for step in self._late for v in _variables(step.invars)}
        read.update(_variables(operations.outputs[:num_weights]))
        made = [v for step in self._early for v in step.outvars]
        self._stash = [v for v in (*self._g, *made) if v in read]

    def inputs(self, leaves: Values, g: Values) -> tuple[Values, Values]:
        """(gradient of the input, what `weights` needs)."""
        given = dict(zip((*self._leaves, *self._g), (*leaves, *g), strict=True))
        wanted = [*self._all.outputs[self._num_weights :], *self._stash]
        found = self._all.run(given, wanted, self._early)
        size = len(wanted) - len(self._stash)
        return found[:size], found[size:]

    def weights(self, leaves: Values, stash: Values) -> Values:
        """The gradients of the weights."""
        given = dict(zip((*self._leaves, *self._stash), (*leaves, *stash), strict=True))
        return self._all.run(given, self._all.outputs[: self._num_weights], self._late)
