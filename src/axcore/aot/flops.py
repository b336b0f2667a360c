"""Floating-point operations, counted on the jaxpr of a program.

XLA's cost analysis counts each loop body once and custom calls not at all, and it needs the device for GPUs. Here,
matrix products, convolutions and kernels are counted, and loop bodies as often as they run. Elementwise operations are
not counted, since they are bound by memory, not by arithmetic.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters import partial_eval

from axcore.parallel.pipeline import Op, Table

_UNCOUNTED = ("custom_call", "ffi_call", "pure_callback", "io_callback")
_KERNELS = ("pallas_call", "mpmd_map")
"""The primitives of `pallas_call` and of `pl.kernel`."""
_BLOCK_MASK = {"splash_mha": 1}
"""Start of the name of a kernel -> the operand that tells which blocks of the grid it computes (not 0) or skips."""
_CUDNN_MATMULS = {
    f"dot_product_attention_{kind}": count
    for precision in ("", "fp8_")
    for kind, count in ((f"{precision}fwd", 2), (f"{precision}bwd", 5))
}
"""Number of matrix products in jax's cuDNN attention. The forward pass computes logits and heads; the backward pass
computes four gradients and recomputes the logits."""


Known = Mapping[Any, Any]  # Any: variables of a jaxpr, and arrays
"""The constants of a jaxpr: variable -> value."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations of one run of a program on all devices together.

    Attributes:
        by_dtype: operations by the dtype of the operands: `bfloat16`, `float32`, `float8`, `int8`, and
            `float32_highest` for products of float32 with `jax.lax.Precision.HIGHEST`.
        uncounted: name -> number of occurrences in the program, for opaque calls and for loops whose number of
            iterations is not known. The body of such a loop is counted once.
    """

    by_dtype: Mapping[str, float]
    uncounted: Mapping[str, int]

    @property
    def total(self) -> float:
        return sum(self.by_dtype.values())


def count_flops(jaxpr: ClosedJaxpr, table: Table | None = None) -> Flops:
    """The operations of a program. A `cond` is counted as its branch with the most operations.

    Results that nothing uses are not counted, since XLA removes them. The gradient of a microbatch has some: the
    backward pass of `jax.checkpoint` recomputes values there that its policy keeps.

    Args:
        table: the schedule of the pipeline stages; None without stages. Each tick is counted as the largest operation
            that a stage runs in it, because the other stages wait for it.
    """
    used, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    counter = _Counter(table)
    return Flops(dict(counter.of(used, _known(jaxpr))), dict(counter.uncounted))


class _Counter:
    def __init__(self, table: Table | None) -> None:
        self.uncounted: Counter[str] = Counter()
        self._table = table

    def of(self, jaxpr: Jaxpr, known: Known) -> Counter[str]:
        """The operations of a jaxpr whose variables `known` are constants."""
        total: Counter[str] = Counter()
        used = {var for var in jaxpr.outvars if isinstance(var, Var)}
        for eqn in reversed(jaxpr.eqns):
            # jax keeps Pallas kernels whose results nothing uses, but XLA removes them.
            if eqn.primitive.name in _KERNELS and not eqn.effects and used.isdisjoint(eqn.outvars):
                continue
            used.update(var for var in eqn.invars if isinstance(var, Var))
            total.update(self._one(eqn, known))
        return total

    def _ticks(self, table: Table, jaxpr: Jaxpr, known: Known) -> Counter[str]:
        """All iterations of the loop over the ticks of a schedule."""
        total: Counter[str] = Counter()
        for eqn in jaxpr.eqns:
            if _is_task(eqn):
                found = [self.of(branch, inside) for branch, inside in _inner(eqn, known)]
                for ops, count in table.together.items():
                    largest = max((found[op] for op in ops), key=lambda each: each.total())
                    total.update({dtype: count * each for dtype, each in largest.items()})
            else:
                total.update({dtype: table.ticks * each for dtype, each in self._one(eqn, known).items()})
        return total

    def _one(self, eqn: JaxprEqn, known: Known) -> Counter[str]:
        name, params = eqn.primitive.name, eqn.params
        if (count := _COUNTS.get(name)) is not None:
            return Counter({_dtype(eqn): count(eqn)})
        if name in _KERNELS:
            return self._kernel(eqn, known)
        if (matmuls := _cudnn(name)) is not None:
            return Counter({_dtype(eqn): _attention(eqn, matmuls)})
        if name in ("cond", "platform_index"):
            return max((self.of(*branch) for branch in _inner(eqn, known)), key=lambda found: found.total())
        if any(word in name for word in _UNCOUNTED):
            self.uncounted[str(params.get("target_name", name))] += 1
            return Counter()
        if self._table is not None and _is_loop_over(self._table, eqn):
            return self._ticks(self._table, *next(_inner(eqn, known)))
        inner: Counter[str] = Counter()
        for below in _inner(eqn, known):
            inner.update(self.of(*below))
        times = 1
        match name:
            case "scan":
                times = params["length"]
            case "while" if inner.total():
                self.uncounted["while"] += 1
            case "shard_map":  # the body computes on shards
                sizes = dict(params["mesh"].shape)
                times = math.prod(sizes[axis] for axis in params[_manual_axes(params)])
        return Counter({dtype: count * times for dtype, count in inner.items()})

    def _kernel(self, eqn: JaxprEqn, known: Known) -> Counter[str]:
        """A Pallas kernel: its `cost_estimate`, or the operations of its body times the number of blocks that it
        computes. A kernel on a mesh of cores, whose loops depend on its data, is not counted without an estimate."""
        estimate = eqn.params.get("cost_estimate")
        if estimate is not None:
            return Counter({_dtype(eqn): estimate.flops})
        if "grid_mapping" not in eqn.params:
            self.uncounted[eqn.params["name"]] += 1
            return Counter()
        grid = math.prod(size for size in eqn.params["grid_mapping"].grid if isinstance(size, int))
        blocks = grid * _computed(eqn, known)
        return Counter({dtype: count * blocks for dtype, count in self.of(eqn.params["jaxpr"], {}).items()})


def _is_loop_over(table: Table, eqn: JaxprEqn) -> bool:
    """Whether an equation is the loop over the ticks of a schedule."""
    if eqn.primitive.name != "scan" or eqn.params["length"] != table.ticks:
        return False
    return any(_is_task(each) for each in eqn.params["jaxpr"].jaxpr.eqns)


def _is_task(eqn: JaxprEqn) -> bool:
    """Whether an equation chooses the operation of a stage."""
    return eqn.primitive.name == "cond" and len(eqn.params["branches"]) == len(Op)


def _manual_axes(params: Mapping[str, Any]) -> str:
    """The name of the parameter of `shard_map`, which differs between versions of jax."""
    return next(name for name in ("newly_manual_axes", "manual_axes") if name in params)


def _known(jaxpr: ClosedJaxpr) -> Known:
    return dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))


def _inner(eqn: JaxprEqn, known: Known) -> Iterator[tuple[Jaxpr, Known]]:
    """The jaxprs in the parameters of an equation, each with the constants that it receives."""
    params, given = eqn.params, eqn.invars
    match eqn.primitive.name:
        case "cond":
            given = given[1:]  # after the index of the branch
        case "while":
            given = []  # its condition and its body receive different ones
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(each, ClosedJaxpr | Jaxpr):
                continue
            inner, constants = (each.jaxpr, _known(each)) if isinstance(each, ClosedJaxpr) else (each, {})
            received = zip(inner.invars, given, strict=False)
            passed = {var: known[outer] for var, outer in received if isinstance(outer, Var) and outer in known}
            yield inner, {**constants, **passed}


def _computed(eqn: JaxprEqn, known: Known) -> float:
    """The share of the blocks of a kernel's grid that it computes; 1 if that is not known."""
    name = str(eqn.params.get("name") or "")
    operand = next((operand for start, operand in _BLOCK_MASK.items() if name.startswith(start)), None)
    mask = None if operand is None else known.get(eqn.invars[operand])
    return 1.0 if mask is None else np.count_nonzero(mask) / np.size(mask)


def _dtype(eqn: JaxprEqn) -> str:
    """The dtype in which a product is computed, as in `Chip.peak`."""
    avals: list[Any] = [var.aval for var in eqn.invars[:2]]  # Any: only arrays have a dtype
    dtypes = [np.dtype(aval.dtype) for aval in avals]
    if all(dtype.itemsize == 1 for dtype in dtypes):
        return "int8" if all(dtype.kind in "iu" for dtype in dtypes) else "float8"
    if all(dtype.itemsize <= 2 for dtype in dtypes):
        return "bfloat16"
    precision = eqn.params.get("precision")
    is_highest = isinstance(precision, tuple) and jax.lax.Precision.HIGHEST in precision
    return "float32_highest" if is_highest else "float32"


def _shape(var: Any) -> tuple[int, ...]:  # Any: only variables of arrays have a shape
    shape: tuple[int, ...] = var.aval.shape
    return shape


def _dot(eqn: JaxprEqn) -> float:
    contracted = eqn.params["dimension_numbers"][0][0]
    return 2.0 * math.prod(_shape(eqn.outvars[0])) * math.prod(_shape(eqn.invars[0])[axis] for axis in contracted)


def _ragged_dot(eqn: JaxprEqn) -> float:
    """Rows [m, k] times groups [g, k, n], or [k, m] times [m, n] for the gradient of the groups. Each row is multiplied
    by one group."""
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    lhs, rhs = (_shape(var) for var in eqn.invars[:2])
    contracted, batched = numbers.dot_dimension_numbers if numbers is not None else (((1,), (1,)), ((), ()))
    groups = set(getattr(numbers, "rhs_group_dimensions", (0,)))
    free = [size for axis, size in enumerate(rhs) if axis not in {*contracted[1], *batched[1], *groups}]
    return 2.0 * math.prod(lhs) * math.prod(free)


def _convolution(eqn: JaxprEqn) -> float:
    kernel, spec = _shape(eqn.invars[1]), eqn.params["dimension_numbers"].rhs_spec
    inputs = kernel[spec[1]] * math.prod(kernel[axis] for axis in spec[2:])
    return 2.0 * math.prod(_shape(eqn.outvars[0])) * inputs / eqn.params["batch_group_count"]


_COUNTS: Mapping[str, Callable[[JaxprEqn], float]] = {
    "dot_general": _dot,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}


def _cudnn(name: str) -> int | None:
    return next((count for start, count in _CUDNN_MATMULS.items() if name.startswith(start)), None)


def _attention(eqn: JaxprEqn, matmuls: int) -> float:
    """cuDNN attention. A causal mask leaves half of the keys, and a window as many keys as its width."""
    q, k = (_shape(var) for var in eqn.invars[:2])
    (batch, queries, heads, features), keys = q, k[1]
    causal = "CAUSAL" in str(eqn.params.get("mask_type", "")).upper() or eqn.params.get("use_causal_mask", False)
    seen = keys / 2 if causal else float(keys)
    window = eqn.params.get("sliding_window_length") or 0
    seen = min(seen, float(window)) if window > 0 else seen
    return 2.0 * matmuls * batch * queries * heads * features * seen
