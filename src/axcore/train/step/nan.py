"""Finding the layer in which a NaN arises, for `jax_debug_nans`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from axcore.train.errors import TrainingError
from axcore.train.step.equations import Equation, bind

Jaxpr = Any  # Any: a Jaxpr or ClosedJaxpr; recent versions of jax have only the former


def checked[**P, R](fn: Callable[P, R], run: Callable[P, R]) -> Callable[P, R]:
    """A function like `run` that raises an error that names the layer if a result contains a NaN.

    Args:
        fn: the function, which is traced to find the layer.
        run: a function with the same results, such as `fn` compiled. It must not donate its arguments.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.debug_nans(False):
            result = run(*args, **kwargs)
            if has_nan(jax.tree.leaves(result)):
                raise TrainingError(f"jax_debug_nans: {origin(fn, *args, **kwargs)}")
        return result

    return call


def origin(fn: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> str:
    """Runs `fn` one operation at a time and describes the layer and operation in which a NaN first arises."""
    if has_nan(jax.tree.leaves((args, kwargs))):
        return "an argument contains a NaN"
    with jax.disable_jit(False):
        jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
        try:
            _run(jaxpr, jax.tree.leaves((args, kwargs)), [])
        except _Found as found:
            return str(found)
    return "the result contains a NaN, but no operation produces one when run alone"


def has_nan(arrays: Sequence[Any]) -> bool:
    """Whether one of the floating-point arrays contains a NaN."""
    return any(bool(_isnan(x).any()) for x in arrays if jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _isnan(x: Any) -> Any:
    # NumPy avoids a compilation for each shape, but cannot read shards of other processes.
    return np.isnan(np.asarray(x)) if getattr(x, "is_fully_addressable", True) else jnp.isnan(x)


class _Found(Exception):
    """The operation in which a NaN arises."""


def _run(jaxpr: Jaxpr, args: Sequence[Any], outer_stacks: list[str]) -> list[Any]:
    """Evaluates a jaxpr and raises `_Found` at the first NaN.

    Args:
        outer_stacks: the name stacks of the enclosing operations.
    """
    inner = _open(jaxpr)
    env = dict(zip([*inner.constvars, *inner.invars], [*jaxpr.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax.extend.core.Literal) else env[atom]

    for eqn in inner.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        outputs = bind(eqn, inputs)
        if has_nan(outputs) and not has_nan(inputs):
            stacks = [*outer_stacks, str(eqn.source_info.name_stack)]
            _descend(eqn, inputs, stacks)
            raise _Found(_message(stacks, eqn.primitive.name))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in inner.outvars]


def _open(jaxpr: Jaxpr) -> Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _descend(eqn: Equation, inputs: Sequence[Any], stacks: list[str]) -> None:
    """Looks for the NaN inside an operation that calls a jaxpr."""
    if eqn.primitive.name == "scan":
        _descend_scan(eqn, inputs, stacks)
        return
    for value in eqn.params.values():
        inner = _open(value)
        if hasattr(inner, "eqns") and len(inner.invars) == len(inputs):
            _run(value, inputs, stacks)


def _descend_scan(eqn: Equation, inputs: Sequence[Any], stacks: list[str]) -> None:
    """Runs the iterations of a scan. Its arguments are constants, the carry and the arrays that are scanned over."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    inner = _open(body)
    num_scanned = sum(outer.aval.ndim > own.aval.ndim for outer, own in zip(eqn.invars, inner.invars, strict=True))
    num_carry = sum(outer.aval.ndim == own.aval.ndim for outer, own in zip(eqn.outvars, inner.outvars, strict=True))
    first = len(inputs) - num_scanned
    consts, carry, xs = inputs[: first - num_carry], list(inputs[first - num_carry : first]), inputs[first:]
    for step in range(length):
        index = length - 1 - step if eqn.params["reverse"] else step
        outputs = _run(body, [*consts, *carry, *(x[index] for x in xs)], [*stacks, f"#{index}"])
        carry = outputs[:num_carry]


def _message(stacks: Sequence[str], operation: str) -> str:
    """The message for an operation. A name stack, such as `transpose(jvp(decoder))/layers/*/ffn`, contains the names of
    layers, with `*` for a layer of a scan, and those of transforms and matrix products."""
    names: list[str] = []
    index = "*"
    for stack in stacks:
        if stack.startswith("#"):
            index = stack[1:]  # a layer if a `*` follows, otherwise a microbatch or chunk
            continue
        for name in re.sub(r"\w+\(|\)", "", stack).split("/"):
            if name == "*":
                names.append(index)
            elif re.fullmatch(r"\w+", name):
                names.append(name)
    direction = "backward" if any("transpose(" in stack for stack in stacks) else "forward"
    where = ".".join(names) or "code outside of the layers"
    return f"a NaN first arises in {where}, in the operation {operation} of the {direction} pass"
