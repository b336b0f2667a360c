"""Divides a jaxpr into a part that can run once before a loop, and the body of the loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
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
    origins: tuple[int, ...]
    """For each of `kept`, the number of the fixed input that it is, or the last one of its shape that it comes from; -1
    if there is none."""
    products: tuple[Equation | None, ...]
    """For each of `kept`, the product with it in the body, if that is all it is used for and its dtype has 16 bits."""

    @classmethod
    def of(cls, jaxpr: Jaxpr, num_varying: int) -> Hoisted:
        """Divides a jaxpr whose constants and inputs are fixed, except for the first `num_varying` inputs."""
        varying: tuple[Var, ...] = tuple(jaxpr.invars[:num_varying])
        fixed: tuple[Var, ...] = (*jaxpr.constvars, *jaxpr.invars[num_varying:])
        known = {v for v in fixed if jnp.issubdtype(v.aval.dtype, jnp.inexact)}
        origins = {v: number for number, v in enumerate(fixed)}
        before: list[Equation] = []
        body: list[Equation] = []
        eqn: Equation
        for eqn in jaxpr.eqns:
            if _can_hoist(eqn, known):
                before.append(eqn)
                known.update(eqn.outvars)
                inputs = [each for each in eqn.invars if not isinstance(each, Literal)]
                for v in eqn.outvars:
                    same = (origins[each] for each in inputs if each.aval.shape == v.aval.shape)
                    origins[v] = max(same, default=-1)
            else:
                body.append(eqn)
        outputs = tuple(jaxpr.outvars)
        inner = {v for eqn in body for v in eqn.outvars}.union(varying)
        read = [v for eqn in body for v in eqn.invars] + list(outputs)
        kept = tuple(dict.fromkeys(v for v in read if not isinstance(v, Literal) and v not in inner))
        products = tuple(_product_with(v, body) for v in kept)
        origin = tuple(origins[v] for v in kept)
        return cls(fixed, varying, tuple(before), tuple(body), kept, outputs, origin, products)

    def hoist(self, fixed: Sequence[jax.Array]) -> list[jax.Array]:
        """The values of `kept`."""
        return _run(self.before, dict(zip(self.fixed, fixed, strict=True)), self.kept)

    def loop(
        self, kept: Sequence[jax.Array], varying: Sequence[jax.Array], sinks: Mapping[int, jax.Array] | None = None
    ) -> list[jax.Array]:
        """The outputs of the function in one iteration.

        Args:
            sinks: for the number of some of the `products`, a float32 array in the shape of that value of `kept`. The
                gradient goes to it, without rounding to 16 bits, instead of to the value.
        """
        inputs = (*zip(self.kept, kept, strict=True), *zip(self.varying, varying, strict=True))
        wide = {id(self.products[number]): sink for number, sink in (sinks or {}).items()}
        return _run(self.body, dict(inputs), self.outputs, wide)


def _can_hoist(eqn: Equation, known: set[Var]) -> bool:
    variables = [v for v in eqn.invars if not isinstance(v, Literal)]
    if not variables or not known.issuperset(variables) or eqn.effects or eqn.primitive.name in _MOVES:
        return False
    return sum(map(_bytes, eqn.outvars)) <= sum(map(_bytes, eqn.invars))


def _bytes(v: Var) -> int:
    return math.prod(v.aval.shape) * int(v.aval.dtype.itemsize)


def _product_with(v: Var, body: Sequence[Equation]) -> Equation | None:
    """The equation `x @ v`, if the body does not use v otherwise."""
    uses = [eqn for eqn in body if any(each is v for each in eqn.invars)]
    if len(uses) != 1 or uses[0].primitive is not jax.lax.dot_general_p or uses[0].invars[0] is v:
        return None
    (eqn,) = uses
    has_batch = bool(eqn.params["dimension_numbers"][1][0])
    is_narrow = v.aval.dtype in (jnp.bfloat16, jnp.float16)
    same = all(each.aval.dtype == v.aval.dtype for each in (*eqn.invars, *eqn.outvars))
    return eqn if is_narrow and same and not has_batch else None


def _run(
    eqns: Sequence[Equation],
    values: dict[Var, jax.Array],
    outputs: Sequence[Var],
    sinks: Mapping[int, jax.Array] | None = None,
) -> list[jax.Array]:
    def value(v: Var) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in eqns:
        inputs = [value(v) for v in eqn.invars]
        sink = (sinks or {}).get(id(eqn))
        found = bind(eqn, inputs) if sink is None else [_product(eqn)(*inputs, sink)]
        values.update(zip(eqn.outvars, found, strict=True))
    return [value(v) for v in outputs]


def _product(eqn: Equation) -> Callable[..., jax.Array]:
    """`product(x, w, sink)`: the product of the equation. The cotangent of the float32 `sink` is the gradient of w."""
    (x_summed, w_summed), _ = eqn.params["dimension_numbers"]

    def forward(x: jax.Array, w: jax.Array, sink: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return bind(eqn, [x, w])[0], (x, w)

    def backward(kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None, jax.Array]:
        x, w = kept
        (x_bar,) = jax.vjp(lambda x: bind(eqn, [x, w])[0], x)[1](g)
        x_free = [axis for axis in range(x.ndim) if axis not in x_summed]
        w_free = [axis for axis in range(w.ndim) if axis not in w_summed]
        over = (list(range(len(x_free))), x_free), ((), ())
        w_bar = jax.lax.dot_general(g, x, over, eqn.params["precision"], jnp.float32)
        axes = [*w_free, *(w_summed[x_summed.index(axis)] for axis in sorted(x_summed))]
        return x_bar, None, w_bar.transpose([axes.index(axis) for axis in range(w.ndim)])

    product: Any = jax.custom_vjp(lambda x, w, sink: forward(x, w, sink)[0])  # Any: its type hides the arguments
    product.defvjp(forward, backward)
    found: Callable[..., jax.Array] = product
    return found
