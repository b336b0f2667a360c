"""`jax.shard_map` of functions that call layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from axcore.config import ConfigError
from axcore.module import ContextError, GradientState
from axcore.module.collections import Collections
from axcore.module.lifted import Body, Lifted
from axcore.module.pure import axes_of
from axcore.parallel.axes import entry_of, group_of
from axcore.parallel.layout import Layout, active_layout


def shard_map(
    fn: Body,
    *,
    in_specs: Sequence[PyTree[PartitionSpec]],
    out_specs: PyTree[PartitionSpec],
    gather: Iterable[str] = (),
    layout: Layout | None = None,
) -> Body:
    """`jax.shard_map` for `fn(module, *args)`, over all mesh axes that no enclosing `shard_map` handles.

    Each device receives its shards of the arguments, parameters and other Variables. The partition specs of Variables
    follow from their logical axes and the rules of the layout. A sharded parameter stays sharded, except over the mesh
    axes in `gather`. `check_vma` is off: gradients taken through the call are correct, but a gradient taken inside `fn`
    covers only the device's own shard.

    Each device draws different random numbers. Summaries are reduced over the devices by their rule; totals and counts
    of losses are added. `fn` may write Variables that have logical axes; devices that hold the same shard must write
    the same value. The gradients of a `GradientState` are reduced by maximum over the devices that hold the same shard.

    Args:
        in_specs: A `PartitionSpec` of mesh axes for each argument, or a pytree of them.
        out_specs: A `PartitionSpec` for the result, or a pytree of them.
        gather: Mesh axes along which `fn` needs whole parameters and state, usually `"fsdp"`. Parameters and state are
            all-gathered on entry, and their gradients are reduce-scattered.
        layout: The layout to use instead of the active one.

    Raises:
        ContextError: No layout is active, an enclosing `shard_map` handles all mesh axes, or `fn` reports captured
            outputs or writes a Variable without axes.
        ConfigError: `gather` names an axis that the mesh does not have, or a Variable is not divisible into shards.
    """

    def wrapped(module: nnx.Module, *args: PyTree) -> PyTree:
        lifted = Lifted.of(module, "shard_map")
        current = _usable(layout, lifted)
        axes = current.automatic
        if unknown := [axis for axis in gather if axis not in axes]:
            raise ConfigError(f"gather names {', '.join(unknown)}, but the axes of the mesh are {', '.join(axes)}")
        specs = [_specs(tree, current, frozenset(gather)) for tree in (lifted.params, lifted.state)]

        def body(
            key: PRNGKeyArray | None, params: PyTree, state: PyTree, *args: PyTree
        ) -> tuple[PyTree, PyTree, Collections | None]:
            state, number = _keep_largest(state, specs[1], current), jax.lax.axis_index(axes)
            with current.inside(axes).active():
                output, state, collections = lifted.call(fn, params, state, *args, number=number, key=key)
            _check_writes(lifted)
            if collections is not None and collections.outputs:
                raise ContextError(f"{', '.join(collections.outputs)}: outputs cannot be captured inside shard_map")
            return output, state, collections and jax.lax.all_gather(collections, axes).reduced()

        mapped = jax.shard_map(
            body,
            mesh=None if current.manual else current.mesh,  # inside another shard_map the mesh is that of the context
            axis_names=set(axes),
            in_specs=(PartitionSpec(), *specs, *in_specs),
            out_specs=(out_specs, specs[1], PartitionSpec()),
            check_vma=False,
        )
        # The key is an argument: inside another shard_map, JAX does not convert a key of the outer mesh in a closure.
        output, state, collections = mapped(lifted.caller.key, lifted.params, _as_read(lifted.state), *args)
        lifted.finish(state, collections)
        return output

    return wrapped


def _usable(layout: Layout | None, lifted: Lifted) -> Layout:
    where, active = lifted.caller.describe(), active_layout()
    layout = active if layout is None else layout.inside(active.manual) if active is not None else layout
    if layout is None:
        raise ContextError(f"{where} runs shard_map, but no layout is active. Call it inside `layout.active()`")
    if not layout.automatic:
        raise ContextError(f"{where} runs shard_map inside another shard_map over all axes of the mesh")
    return layout


def _specs(variables: PyTree, layout: Layout, gather: frozenset[str]) -> PyTree[PartitionSpec]:
    """The partition spec of each Variable by its logical axes, without the mesh axes in `gather`."""

    def spec(path: KeyPath[object], variable: nnx.Variable[jax.Array]) -> PartitionSpec:
        value = variable.get_raw_value()
        found = layout.variable_spec(axes_of(variable), value.shape)
        for size, axes in zip(value.shape, found, strict=True):
            if size % layout.size_of(axes):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ConfigError(
                    f"{name} of shape {value.shape} is not divisible into shards by {found} on the mesh "
                    f"{dict(layout.mesh.shape)}"
                )
        return PartitionSpec(
            *(entry_of(tuple(axis for axis in group_of(axes) if axis not in gather)) for axes in found)
        )

    def with_spec(path: KeyPath[object], variable: nnx.Variable[jax.Array]) -> PyTree[PartitionSpec]:
        found = spec(path, variable)
        return jax.tree.map(lambda _: found, variable)  # specs replace the arrays inside the Variables

    return jax.tree.map_with_path(with_spec, variables, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _check_writes(lifted: Lifted) -> None:
    """Checks that all written Variables have logical axes. Without axes, devices could write different values."""
    named = {path for path, variable in nnx.to_flat_state(lifted.state) if variable.get_metadata().get("axes")}
    if unnamed := sorted(".".join(map(str, path)) for path in lifted.written - named):
        raise ContextError(
            f"in {lifted.caller.describe()} a layer writes {', '.join(unnamed)} inside shard_map, but the Variable has "
            f"no axes. Create it with axes=(...), or write it outside"
        )


def _as_read(state: PyTree) -> PyTree:
    """Converts `GradientState` to float32 outside the mapped function, because collectives do not support `fm32`, its
    dtype in the training step."""

    def read(variable: nnx.Variable[jax.Array]) -> PyTree:
        if not isinstance(variable, GradientState):
            return variable
        value = variable[...]
        return jax.tree.map(lambda _: value, variable)

    return jax.tree.map(read, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _keep_largest(state: PyTree, specs: PyTree[PartitionSpec], layout: Layout) -> PyTree:
    """Reduces the gradients of each `GradientState` by maximum over the devices that hold the same shard. JAX would add
    them."""

    def guard(variable: nnx.Variable[jax.Array], spec: PyTree[PartitionSpec]) -> PyTree:
        if not isinstance(variable, GradientState):
            return variable
        named = {axis for dimension in jax.tree.leaves(spec)[0] for axis in group_of(dimension)}
        over = tuple(axis for axis in layout.automatic if axis not in named)
        return jax.tree.map(lambda x: _largest(x, over, layout.size_of(over)), variable)

    return jax.tree.map(guard, state, specs, is_leaf=lambda node: isinstance(node, nnx.Variable))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _largest(x: Float[Array, ...], axes: tuple[str, ...], count: int) -> Float[Array, ...]:
    return x


def _largest_forward(x: Float[Array, ...], axes: tuple[str, ...], count: int) -> tuple[Float[Array, ...], None]:
    return x, None


def _largest_backward(axes: tuple[str, ...], count: int, _: None, g: Float[Array, ...]) -> tuple[Float[Array, ...]]:
    """The transpose of shard_map adds the gradients of all devices, so each returns an equal share of the maximum."""
    return (jax.lax.pmax(g, axes) / count if axes else g,)


_largest.defvjp(_largest_forward, _largest_backward)
