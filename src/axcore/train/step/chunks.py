"""Sums over the tokens of a batch, computed with their gradients for one chunk of tokens at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, PyTree

from axcore.module import Collections, ContextError, GradientState, Reduce, Summary, to_fm32
from axcore.module.lifted import Lifted
from axcore.module.pure import axes_of
from axcore.parallel import Layout, active_layout
from axcore.parallel.axes import entry_of, group_of
from axcore.train.step.hoisting import Hoisted

Leaves = list[jax.Array]
Gradients = list[jax.Array | None]
"""None for arrays without gradients."""


def chunked_sum[M: nnx.Module](
    fn: Callable[..., tuple[Float[Array, ""], PyTree[Float[Array, ""]]]], size: int
) -> Callable[..., tuple[Float[Array, ""], PyTree[Float[Array, ""]]]]:
    """Computes `fn(module, *args)` for at most `size` tokens of each device at a time, and adds the results.

    If gradients are asked for, the forward pass computes those of each chunk together with its results, so that no
    intermediate array outlives its chunk and nothing is computed twice. The backward pass scales them. The gradients of
    parameters are summed in float32 and rounded once. Operations that depend on parameters only, such as a cast or the
    quantization of a weight, run once.

    Args:
        fn: maps the module and arrays [1, tokens, ...] to `(total, parts)`, a scalar and a pytree of scalars, each of
            which is a sum over the tokens. Tokens that fill up the last chunk are 0 in all arrays and must add nothing.
            Each chunk draws different random numbers. Summaries that layers add are reduced over the chunks and
            devices by their rule; they include the tokens that fill up the last chunk, and have no gradients.
        size: number of tokens.

    Returns:
        A function of the module, the expected cotangent of `total` and arrays [batch, seq, ...], which returns
        `(total, parts)`. Gradients are exact for every cotangent; those of 16 bits have the range that the expected one
        gives them, or 1 if it is 0. `parts` have no gradients.

    Raises:
        ContextError: `fn` adds a loss or a captured output, or writes a Variable.
    """

    def wrapped(
        module: M, expected: Float[Array, ""], *args: jax.Array
    ) -> tuple[Float[Array, ""], PyTree[Float[Array, ""]]]:
        lifted = Lifted.of(module, "chunked_sum")
        shards = _Shards.of(args[0].shape)
        values, is_state, axes, structure = _variables(lifted)

        def body(number: jax.Array, args: tuple[jax.Array, ...], key: jax.Array | None, values: Leaves) -> PyTree:
            params, state = jax.tree.unflatten(structure, values)
            output, _, collections = lifted.call(fn, params, state, *args, number=number, key=key)
            lifted.refuse_written("chunked_sum")
            if collections is None:
                return output, {}
            if refused := {**collections.losses, **collections.outputs}:
                raise ContextError(
                    f"{lifted.caller.describe()}: the body of chunked_sum reports {', '.join(sorted(refused))}, but "
                    f"only summaries and what it returns are kept. With CrossEntropy, set chunk=None, or remove the "
                    f"layers that add losses or outputs from the head; elsewhere, return the values, and report them "
                    f"after chunked_sum"
                )
            return output, collections.summaries

        cut = _Cut.of(shards.local(args[0].shape), size)
        key = lifted.caller.key
        forms = jax.tree.map(_form, (jnp.int32(0), args, key, values))
        with shards.inside():
            made, result = jax.make_jaxpr(body, return_shape=True)(
                forms[0], tuple(cut.form(x) for x in args), forms[2], _as_state(forms[3], is_state)
            )
        summaries: dict[str, Summary] = result[1]
        hoisted = Hoisted.of(made.jaxpr, 1 + len(args))
        given = [*made.consts, *jax.tree.leaves(key), *values]
        others = len(given) - len(values)
        variables = [origin - others if origin >= others else None for origin in hoisted.origins]
        rule = _Rule(
            hoisted,
            cut,
            shards,
            [each.reduce for each in jax.tree.leaves(summaries, is_leaf=lambda node: isinstance(node, Summary))],
            [n is not None and is_state[n] for n in variables],
            [PartitionSpec() if n is None else shards.of_variable(axes[n], values[n].shape) for n in variables],
        )
        expected = jnp.where(expected == 0, 1.0, expected)
        found = rule.function()(expected, hoisted.hoist(given), list(args))
        (total, parts), summaries = jax.tree.unflatten(jax.tree.structure(result), found)
        lifted.caller.absorb(Collections(summaries))
        return total, parts

    return wrapped


@dataclasses.dataclass(frozen=True)
class _Shards:
    """How the tokens of arrays [batch, seq, ...] are sharded.

    Attributes:
        layout: the active layout; None without one.
        spec: the mesh axes of `batch` and `seq`.
        axes: the mesh axes over which the loop runs under `jax.shard_map`, so that each device has its own loop and
            gradients are reduced once after it; empty if tokens are not sharded. The compiler handles other axes.
    """

    layout: Layout | None
    spec: PartitionSpec = PartitionSpec()
    axes: tuple[str, ...] = ()

    @classmethod
    def of(cls, shape: Sequence[int]) -> _Shards:
        layout = active_layout()
        if layout is None:
            return cls(None)
        # If `seq` and `vocab` map to one axis, logits are sharded by vocabulary. 0 is divisible by every number.
        spec = PartitionSpec(*layout.spec(("batch", "seq", "vocab"), (*shape[:2], 0))[:2])
        tokens = {axis for entry in spec for axis in group_of(entry)}
        if all(layout.size_of(axis) == 1 for axis in tokens):
            return cls(layout)
        axes = tuple(axis for axis in layout.automatic if axis in tokens or layout.size_of(axis) == 1)
        return cls(layout, spec, axes)

    def local(self, shape: Sequence[int]) -> tuple[int, int]:
        """(rows, tokens per row) on one device."""
        if self.layout is None or not self.axes:
            return shape[0], shape[1]
        rows, tokens = (self.layout.size_of(entry) for entry in self.spec)
        return shape[0] // rows, shape[1] // tokens

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The context in which the body of `map` is traced."""
        if self.layout is None or not self.axes:
            yield
            return
        manual = dict.fromkeys(self.axes, AxisType.Manual)
        mesh = jax.sharding.get_abstract_mesh() if self.layout.manual else self.layout.mesh
        mesh = mesh.abstract_mesh if isinstance(mesh, jax.sharding.Mesh) else mesh
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(manual)), self.layout.inside(self.axes).active():
            yield

    def map(self, fn: Callable[..., PyTree], specs: PyTree[PartitionSpec]) -> Callable[..., PyTree]:
        """`fn(expected, fixed, args)` on the tokens of each device. `specs` are those of the results."""
        if self.layout is None or not self.axes:
            return fn
        return jax.shard_map(
            fn,
            mesh=None if self.layout.manual else self.layout.mesh,
            axis_names=set(self.axes),
            in_specs=(PartitionSpec(), PartitionSpec(), self.spec),
            out_specs=specs,
            check_vma=False,
        )

    def of_variable(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """How the rules shard a Variable over `self.axes`."""
        if self.layout is None or not self.axes:
            return PartitionSpec()
        groups = map(group_of, self.layout.spec(axes, shape))
        return PartitionSpec(*(entry_of(tuple(axis for axis in group if axis in self.axes)) for group in groups))

    def summed(self, x: PyTree) -> PyTree:
        """The sum over all devices, on each of them."""
        return jax.lax.psum(x, self.axes) if self.axes else x

    def scattered(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """The sum over all devices, sharded by `spec`."""
        for dimension, entry in enumerate(spec):
            if group := group_of(entry):
                x = jax.lax.psum_scatter(x, group, scatter_dimension=dimension, tiled=True)
        sharded = {axis for entry in spec for axis in group_of(entry)}
        rest = tuple(axis for axis in self.axes if axis not in sharded)
        return jax.lax.psum(x, rest) if rest else x

    def reduced(self, x: jax.Array, rule: Reduce) -> jax.Array:
        """The reduction of x over all devices, on each of them."""
        return rule.over(jax.lax.all_gather(x, self.axes)) if self.axes else x

    def largest(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def index(self) -> jax.Array | int:
        """The number of the device among those that have other tokens."""
        return jax.lax.axis_index(self.axes) if self.axes else 0


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How arrays [rows, seq, ...] on one device are cut into `count` chunks [1, size, ...]."""

    rows: int
    seq: int
    count: int
    size: int

    @classmethod
    def of(cls, shape: tuple[int, int], size: int) -> _Cut:
        count = max(1, math.ceil(math.prod(shape) / size))
        return cls(*shape, count, math.ceil(math.prod(shape) / count))

    def form(self, x: jax.Array) -> jax.ShapeDtypeStruct:
        """The shape and dtype of a chunk."""
        return jax.ShapeDtypeStruct((1, self.size, *x.shape[2:]), x.dtype)

    def split(self, x: jax.Array) -> jax.Array:
        """[rows, seq, ...] -> [count, 1, size, ...], filled up with 0."""
        x = x.reshape(-1, *x.shape[2:])
        x = jnp.pad(x, [(0, self.count * self.size - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(self.count, 1, self.size, *x.shape[1:])

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        return x.reshape(-1, *x.shape[3:])[: self.rows * self.seq].reshape(self.rows, self.seq, *x.shape[3:])


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The outputs of the body, sums and then summaries, and the custom derivative of the first sum, as a function of
    `expected`, `fixed` and `args`.

    Attributes:
        reports: how each summary is reduced.
        largest: for each array in `fixed`, whether it is a `GradientState`, whose cotangents are reduced by maximum.
    """

    body: Hoisted
    cut: _Cut
    shards: _Shards
    reports: list[Reduce]
    largest: list[bool]
    specs: list[PartitionSpec]
    """How the gradients of the arrays in `fixed` are sharded."""

    def function(self) -> Callable[[jax.Array, Leaves, Leaves], Leaves]:
        found = jax.custom_vjp(self.shards.map(self._sums, PartitionSpec()))
        found.defvjp(self.forward, self.backward)
        return found

    def forward(self, expected: jax.Array, fixed: Leaves, args: Leaves) -> tuple[Leaves, tuple[Any, ...]]:
        specs = PartitionSpec(), self.specs, self.shards.spec
        sums, of_fixed, of_args = self.shards.map(self._sums_and_gradients, specs)(expected, fixed, args)
        return sums, (expected, of_fixed, of_args)

    def backward(self, kept: tuple[Any, ...], cotangents: Leaves) -> tuple[None, Gradients, Gradients]:
        expected, of_fixed, of_args = kept
        ratio = cotangents[0] / expected

        def scaled(g: jax.Array | None) -> jax.Array | None:
            return None if g is None else (g * ratio).astype(g.dtype)

        pairs = zip(of_fixed, self.largest, strict=True)
        return None, [g if largest else scaled(g) for g, largest in pairs], [scaled(g) for g in of_args]

    def _sums(self, expected: jax.Array, fixed: Leaves, args: Leaves) -> Leaves:
        fixed = _as_state(fixed, self.largest)

        def step(sums: Leaves, inputs: tuple[jax.Array, ...]) -> tuple[Leaves, Leaves]:
            return self._split(sums, self.body.loop(fixed, inputs))

        return self._over_devices(*jax.lax.scan(step, self._zeros(), self._inputs(args)))

    def _sums_and_gradients(
        self, expected: jax.Array, fixed: Leaves, args: Leaves
    ) -> tuple[Leaves, Gradients, Gradients]:
        """(outputs, gradients of fixed, gradients of args)."""
        state = _as_state(fixed, self.largest)
        has_gradient = [_is_float(x) or largest for x, largest in zip(fixed, self.largest, strict=True)]
        is_float = [_is_float(x) for x in args]

        def step(
            carry: tuple[Leaves, Leaves], inputs: tuple[jax.Array, ...]
        ) -> tuple[tuple[Leaves, Leaves], tuple[Leaves, Leaves]]:
            number, *chunk = inputs
            sums, gradients = carry
            sinks = _merged(has_gradient, gradients, state)

            def total(read: Leaves, floats: Leaves) -> tuple[jax.Array, Leaves]:
                varying = number, *_merged(is_float, floats, chunk)
                given = _merged(has_gradient, read, state)
                wide = {n: given[n] for n, product in enumerate(self.body.products) if product}
                values = [state[n] if n in wide else each for n, each in enumerate(given)]
                outputs = self.body.loop(values, varying, wide)
                return outputs[0], outputs

            read = [sink if product else x for sink, x, product in zip(sinks, state, self.body.products, strict=True)]
            found, pull, outputs = jax.vjp(total, _where(has_gradient, read), _where(is_float, chunk), has_aux=True)
            of_fixed, of_chunk = pull(expected.astype(found.dtype))
            sums, reports = self._split(sums, outputs)
            return (sums, self._accumulated(gradients, of_fixed, has_gradient)), (reports, of_chunk)

        start = [
            jnp.full(x.shape, -jnp.inf if largest else 0.0, jnp.promote_types(x.dtype, jnp.float32))
            for x, largest in zip(fixed, self.largest, strict=True)
            if _is_float(x) or largest
        ]
        (sums, of_fixed), (reports, of_args) = jax.lax.scan(step, (self._zeros(), start), self._inputs(args))
        flags, specs = _where(has_gradient, self.largest), _where(has_gradient, self.specs)
        reduced = [
            self.shards.largest(g) if largest else self.shards.scattered(g, spec).astype(x.dtype)
            for g, x, largest, spec in zip(of_fixed, _where(has_gradient, fixed), flags, specs, strict=True)
        ]
        nothing: list[Any] = [None] * len(fixed)
        return (
            self._over_devices(sums, reports),
            _merged(has_gradient, reduced, nothing),
            _merged(is_float, [self.cut.joined(g) for g in of_args], [None] * len(args)),
        )

    def _accumulated(self, sums: Leaves, gradients: Leaves, has_gradient: list[bool]) -> Leaves:

        def added(total: jax.Array, g: jax.Array, largest: bool) -> jax.Array:
            g = jax.lax.convert_element_type(g, total.dtype)
            return jnp.maximum(total, g) if largest else total + g

        flags = _where(has_gradient, self.largest)
        return [added(*each) for each in zip(sums, gradients, flags, strict=True)]

    def _split(self, sums: Leaves, outputs: Leaves) -> tuple[Leaves, Leaves]:
        """(`sums` with those of a chunk, the summaries of the chunk)."""
        return [x + y for x, y in zip(sums, outputs, strict=False)], outputs[len(sums) :]

    def _over_devices(self, sums: Leaves, reports: Leaves) -> Leaves:
        """The outputs over all devices, from the sums and the summaries [count, ...] of a device."""
        pairs = zip(reports, self.reports, strict=True)
        return [*self.shards.summed(sums), *(self.shards.reduced(rule.over(x), rule) for x, rule in pairs)]

    def _zeros(self) -> Leaves:
        sums = self.body.outputs[: len(self.body.outputs) - len(self.reports)]
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in sums]

    def _inputs(self, args: Leaves) -> tuple[jax.Array, ...]:
        numbers = self.shards.index() * self.cut.count + jnp.arange(self.cut.count, dtype=jnp.int32)
        return numbers, *map(self.cut.split, args)


def _variables(lifted: Lifted) -> tuple[Leaves, list[bool], list[tuple[str | None, ...]], Any]:
    """The arrays of the module, whether each is a `GradientState`, their logical axes and their structure. State is
    read as float32."""
    values: Leaves = []
    is_state: list[bool] = []
    axes: list[tuple[str | None, ...]] = []

    def read(variable: nnx.Variable[jax.Array]) -> PyTree:
        is_state.append(isinstance(variable, GradientState))
        axes.append(() if is_state[-1] else axes_of(variable))
        values.append(variable[...] if is_state[-1] else variable.get_raw_value())
        return jax.tree.map(lambda _: values[-1], variable)

    both = lifted.params, lifted.state
    tree = jax.tree.map(read, both, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return values, is_state, axes, jax.tree.structure(tree)


def _as_state(values: Leaves, is_state: list[bool]) -> Leaves:
    """The values with `GradientState` as `fm32`, whose cotangent tells a state that no loss depends on from 0."""

    def convert(x: jax.Array) -> jax.Array:
        return jax.eval_shape(to_fm32, x) if isinstance(x, jax.ShapeDtypeStruct) else to_fm32(x)

    return [convert(x) if each else x for x, each in zip(values, is_state, strict=True)]


def _form(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _where[T](flags: list[bool], values: Sequence[T]) -> list[T]:
    """The values whose flag is set."""
    return [value for flag, value in zip(flags, values, strict=True) if flag]


def _merged(flags: list[bool], values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The next of `values` where the flag is set, and the element of `others` elsewhere."""
    following = iter(values)
    return [next(following) if flag else other for flag, other in zip(flags, others, strict=True)]
