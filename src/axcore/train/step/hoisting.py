"""Divides a jaxpr into a part that can run once before a loop, and the body of the loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from axcore.train.step.equations import Equation, bind

Var = Any  # Any: private to jax
_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
"""Primitives that products absorb. Before the loop they would make copies."""


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """A function of fixed and varying inputs as `loop(hoist(fixed), varying)`.

    Only operations on floating-point arrays that make no array larger are hoisted, such as casts and quantization of a
    weight. The others would store arrays for the whole loop that the compiler fuses into their consumers.
    """

    fixed: tuple[Var, ...]
    varying: tuple[Var, ...]
    before: tuple[Equation, ...]
    body: tuple[Equation, ...]
    kept: tuple[Var, ...]
    """The fixed inputs and the results of `before` that the body reads."""
    outputs: tuple[Var, ...]

    @classmethod
    def of(cls, jaxpr: Jaxpr, num_varying: int) -> Hoisted:
        """Divides a jaxpr whose constants and inputs are fixed, except for the first `num_varying` inputs."""
        varying, fixed = tuple(jaxpr.invars[:num_varying]), (*jaxpr.constvars, *jaxpr.invars[num_varying:])
        known = {v for v in fixed if jnp.issubdtype(v.aval.dtype, jnp.inexact)}
        before: list[Equation] = []
        body: list[Equation] = []
        for eqn in jaxpr.eqns:
            if _can_hoist(eqn, known):
                before.append(eqn)
                known.update(eqn.outvars)
            else:
                body.append(eqn)
        outputs = tuple(jaxpr.outvars)
        inner = {v for eqn in body for v in eqn.outvars}.union(varying)
        read = [v for eqn in body for v in eqn.invars] + list(outputs)
        kept = tuple(dict.fromkeys(v for v in read if not isinstance(v, Literal) and v not in inner))
        return cls(fixed, varying, tuple(before), tuple(body), kept, outputs)

    def hoist(self, fixed: Sequence[jax.Array]) -> list[jax.Array]:
        """The values of `kept`."""
        return _run(self.before, dict(zip(self.fixed, fixed, strict=True)), self.kept)

    def loop(self, kept: Sequence[jax.Array], varying: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs of the function in one iteration."""
        inputs = (*zip(self.kept, kept, strict=True), *zip(self.varying, varying, strict=True))
        return _run(self.body, dict(inputs), self.outputs)


def _can_hoist(eqn: Equation, known: set[Var]) -> bool:
    variables = [v for v in eqn.invars if not isinstance(v, Literal)]
    if not variables or not known.issuperset(variables) or eqn.effects or eqn.primitive.name in _MOVES:
        return False
    return sum(map(_bytes, eqn.outvars)) <= sum(map(_bytes, eqn.invars))


def _bytes(v: Var) -> int:
    return math.prod(v.aval.shape) * int(v.aval.dtype.itemsize)


def _run(eqns: Sequence[Equation], values: dict[Var, jax.Array], outputs: Sequence[Var]) -> list[jax.Array]:
    def value(v: Var) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in eqns:
        values.update(zip(eqn.outvars, bind(eqn, [value(v) for v in eqn.invars]), strict=True))
    return [value(v) for v in outputs]
