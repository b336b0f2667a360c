"""The temporaries and the memory traffic of a training step, estimated from its jaxpr for any sharding.

The arrays of a step are of two kinds: those that grow with the batch, and those that are shaped like parameters. Their
sizes on a device follow from the mesh. The estimate is the largest sum of arrays that are alive at
the same time. Results of elementwise operations are taken to be fused into their users, so their operands stay alive
instead. A scan that is unrolled completely is taken apart into its layers, since XLA
fuses across them and stacks nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

_FUSED = frozenset(
    [
        "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type", "copy", "cos",
        "div", "eq", "erf", "exp", "exp2", "expand_dims", "floor", "ge", "gt", "integer_pow", "iota", "is_finite",
        "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "not",
        "optimization_barrier", "or", "pow", "reshape", "round", "rsqrt", "select_n", "sharding_constraint", "sign",
        "sin", "slice", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor",
    ]
)  # fmt: skip
_LOOPS = ("scan", "while")
_CONTROL = (*_LOOPS, "cond", "pallas_call")
_PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general")
_MOST_OPERANDS = 6
"""Elementwise operations on more arrays than this are computed once."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of arrays on one device.

    Attributes:
        rows: the batch rows with which the jaxpr was traced, a prime that divides no other dimension.
        parameters: the numbers of elements of parameters, and of one layer's. Arrays with other numbers grow with the
            batch even if no dimension is a multiple of `rows`, as the padded rows of mixtures.
        per_device: the batch rows on one device, of one microbatch.
        share: the share of the parameters on one device.
        tensor: the number of shards of heads and hidden features.
        dim: the width of the residual stream, which is not sharded over `tensor`.
    """

    rows: int
    per_device: float
    share: float
    tensor: int
    dim: int
    parameters: frozenset[int] = frozenset()

    def of(self, var: Any, *, gathered: bool = False) -> float:
        """The bytes of a variable of a jaxpr.

        Args:
            gathered: whether parameters are in a layer, where the devices of fsdp gather them.
        """
        shape = _shape(var)
        total = float(math.prod(shape) * _itemsize(var))
        if self.has_rows(shape):
            whole = total / self.rows * self.per_device
            return whole if shape[-1] in (self.dim, 1) or len(shape) < 3 else whole / self.tensor
        return total / self.tensor if gathered else total * self.share

    def has_rows(self, shape: tuple[int, ...]) -> bool:
        return _has_rows(shape, self.rows, self.parameters)


def temporaries(jaxpr: ClosedJaxpr, sizes: Sizes) -> float:
    """The bytes of the temporaries on one device. Results that are shaped like parameters are donated."""
    return _Peak(sizes, gathered=False).of(jaxpr.jaxpr)


def traffic(jaxpr: ClosedJaxpr, sizes: Sizes) -> float:
    """The bytes of activations that are written on one device, loop bodies as often as they run."""
    return _Peak(sizes, gathered=False).written(jaxpr.jaxpr)


class _Peak:
    def __init__(self, sizes: Sizes, gathered: bool):
        self._sizes, self._gathered = sizes, gathered

    def of(self, jaxpr: Jaxpr) -> float:
        """The largest number of bytes alive during the jaxpr, without its arguments."""
        steps, results, roots, last = _lifetimes(jaxpr, self._sizes.rows, self._sizes.parameters)
        alive = peak = 0.0
        ends: dict[int, float] = {}
        for index, step in enumerate(steps):
            created = 0.0
            for var in step.outputs:
                if var in roots:
                    continue  # fused into its users
                size = self._created(var, var in results)
                end = max(last.get(var, index), index)
                created, ends[end] = created + size, ends.get(end, 0.0) + size
            peak = max(peak, alive + created + self._beside(step, roots))
            alive += created - ends.pop(index, 0.0)
        return peak

    def written(self, jaxpr: Jaxpr) -> float:
        """The bytes of all results with batch rows that are not fused."""
        steps, _, roots, _ = _lifetimes(jaxpr, self._sizes.rows, self._sizes.parameters)
        total = 0.0
        for step in steps:
            name, params = step.eqn.primitive.name, step.eqn.params
            if name == "scan":
                total += params["length"] * _Peak(self._sizes, gathered=True).written(_jaxpr(params["jaxpr"]))
            elif name == "cond":
                total += max(self.written(_jaxpr(branch)) for branch in params["branches"])
            else:
                rows = (var for var in step.outputs if var not in roots and self._sizes.has_rows(_shape(var)))
                total += sum(self._sizes.of(var) for var in rows)
        return total

    def _created(self, var: Any, is_result: bool) -> float:
        donated = is_result and not self._gathered and not self._sizes.has_rows(_shape(var))
        return 0.0 if donated else self._sizes.of(var, gathered=self._gathered)

    def _beside(self, step: Step, roots: Mapping[Any, object]) -> float:
        """The bytes that one operation needs beside its operands and results."""
        name, params = step.eqn.primitive.name, step.eqn.params
        if name == "scan":
            body = _jaxpr(params["jaxpr"])
            return self._layer(step, body) + _Peak(self._sizes, gathered=True).of(body)
        if name == "cond":
            return max(self.of(_jaxpr(branch)) for branch in params["branches"])
        if name in _PRODUCTS:  # operands that are read from memory
            return sum(self._sizes.of(var) for var in step.inputs if var in roots and self._sizes.has_rows(_shape(var)))
        return 0.0

    def _layer(self, scan: Step, body: Jaxpr) -> float:
        """The parameters of one layer. If they are converted to another dtype, they are gathered in that one."""
        used: dict[Any, set[int]] = {}
        for step in _lifetimes(body, self._sizes.rows, self._sizes.parameters)[0]:
            converted = step.eqn.primitive.name == "convert_element_type"
            for var in step.inputs:
                used.setdefault(var, set()).add(_itemsize(step.outputs[0] if converted else var))
        total = 0.0
        for outer, inner in zip(scan.eqn.invars, body.invars, strict=True):
            if _shape(outer)[1:] == _shape(inner) != _shape(outer) and not self._sizes.has_rows(_shape(inner)):
                total += self._sizes.of(inner, gathered=True) * max(used.get(inner, {0})) / _itemsize(inner)
        return total


class Step(NamedTuple):
    """One equation of a flat jaxpr, and its variables there."""

    eqn: JaxprEqn
    inputs: tuple[Any, ...]  # Any: variables of jaxprs; those of jax.extend.core have no attributes
    outputs: tuple[Any, ...]


def _has_rows(shape: tuple[int, ...], rows: int, parameters: frozenset[int]) -> bool:
    if any(size % rows == 0 and size > 0 for size in shape):
        return True
    return bool(parameters) and math.prod(shape) > max(parameters) // 1024 and math.prod(shape) not in parameters


@functools.cache
def _lifetimes(
    jaxpr: Jaxpr, rows: int, parameters: frozenset[int]
) -> tuple[list[Step], frozenset[Any], dict[Any, frozenset[Any]], dict[Any, int]]:
    """(steps, results, fused variable -> the variables that it is computed from, variable -> its last use)."""
    steps, results = _flat(jaxpr)
    kept = {var for step in steps if step.eqn.primitive.name in _LOOPS for var in step.inputs}
    operands = {var for step in steps if step.eqn.primitive.name in _PRODUCTS for var in step.inputs}
    kept |= {var for var in operands | results if _has_rows(_shape(var), rows, parameters)}
    roots: dict[Any, frozenset[Any]] = {}
    last: dict[Any, int] = {}
    for index, step in enumerate(steps):
        used = frozenset(root for var in step.inputs for root in roots.get(var, (var,)))
        last.update(dict.fromkeys(used, index))
        if step.eqn.primitive.name in _FUSED and sum(bool(_shape(var)) for var in used) <= _MOST_OPERANDS:
            roots.update({var: used for var in step.outputs if var not in kept})
    for var in results:
        last.update(dict.fromkeys(roots.get(var, (var,)), len(steps)))
    return steps, results, roots, last


def _flat(jaxpr: Jaxpr) -> tuple[list[Step], frozenset[Any]]:
    """The equations with calls of functions inlined, and the results."""
    steps: list[Step] = []

    layers: dict[Any, list[Any]] = {}
    """The results of an unrolled scan that are stacked -> its results for each layer."""

    def unrolled(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        """Appends the equations of every layer of a scan and returns its results."""
        body, length = _jaxpr(eqn.params["jaxpr"]), eqn.params["length"]
        stacked = sum(_shape(outer) != _shape(inner) for outer, inner in zip(eqn.outvars, body.outvars, strict=True))
        sliced = sum(_shape(outer) != _shape(inner) for outer, inner in zip(eqn.invars, body.invars, strict=True))
        carried = len(body.outvars) - stacked
        fixed = len(body.invars) - sliced - carried
        carry = inputs[fixed : fixed + carried]
        results: list[list[Any]] = [[] for _ in range(stacked)]
        for index in reversed(range(length)) if eqn.params["reverse"] else range(length):
            slices = [layers[var][index] if var in layers else var for var in inputs[fixed + carried :]]
            found = inline(body, dict(zip(body.invars, [*inputs[:fixed], *carry, *slices], strict=True)))
            carry = found[:carried]
            for each, var in zip(results, found[carried:], strict=True):
                each.append(var)
        stacks = [_Variable(var.aval) for var in eqn.outvars[carried:]]
        for stack, each in zip(stacks, results, strict=True):
            layers[stack] = each[::-1] if eqn.params["reverse"] else each
        return [*carry, *stacks]

    def inline(body: Jaxpr, names: dict[Any, Any]) -> list[Any]:
        """Appends the equations of a body and returns its results."""
        for eqn in body.eqns:
            inputs = [var if isinstance(var, Literal) else names.get(var, var) for var in eqn.invars]
            called = [] if eqn.primitive.name in _CONTROL else [_jaxpr(each) for each in eqn.params.values() if (
                isinstance(each, ClosedJaxpr | Jaxpr))]  # fmt: skip
            if len(called) == 1 and len(called[0].invars) == len(inputs):
                found = inline(called[0], dict(zip(called[0].invars, inputs, strict=True)))
                names.update(zip(eqn.outvars, found, strict=True))
                continue
            if eqn.primitive.name == "scan" and 1 < eqn.params["length"] <= eqn.params["unroll"]:
                names.update(zip(eqn.outvars, unrolled(eqn, inputs), strict=True))
                continue
            # A body that is called twice has the same variables twice: a new one for each call.
            fresh = [_Variable(var.aval) for var in eqn.outvars]
            names.update(zip(eqn.outvars, fresh, strict=True))
            used = [part for var in inputs if not isinstance(var, Literal) for part in layers.get(var, (var,))]
            steps.append(Step(eqn, tuple(var for var in used if not isinstance(var, Literal)), tuple(fresh)))
        return [var if isinstance(var, Literal) else names.get(var, var) for var in body.outvars]

    results = inline(jaxpr, {})
    parts = (part for var in results if not isinstance(var, Literal) for part in layers.get(var, (var,)))
    return steps, frozenset(part for part in parts if not isinstance(part, Literal))


class _Variable:
    def __init__(self, aval: Any):  # Any: an abstract value of jax
        self.aval = aval


def _shape(var: Any) -> tuple[int, ...]:  # Any: only variables of arrays have a shape
    return getattr(var.aval, "shape", ())


def _itemsize(var: Any) -> int:
    return getattr(getattr(var.aval, "dtype", None), "itemsize", 0)


def _jaxpr(value: Any) -> Jaxpr:  # Any: a Jaxpr, or a ClosedJaxpr in earlier versions of jax
    return getattr(value, "jaxpr", value)
