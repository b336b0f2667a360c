"""`jax.shard_map` of functions that call layers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from axcore.config import ConfigError
from axcore.module import ContextError, GradientState
from axcore.module.lifted import Lifted
from axcore.module.pure import axes_of
from axcore.parallel.mesh import Layout, active_layout, entry_of, group_of

Body = Callable[..., Any]


def shard_map(
    fn: Body, *, in_specs: Sequence[Any], out_specs: Any, gather: Iterable[str] = (), layout: Layout | None = None
) -> Body:
    """`jax.shard_map` over all axes of the mesh, for `fn(module, *args)`.

    Each device gets its shards of the arguments, parameters and other Variables. Those of the module follow from their
    logical axes and the rules of the layout, so no device holds a whole sharded parameter, unless its mesh axes are in
    `gather`. `check_vma` is off: gradients taken through the call are correct; a gradient taken inside `fn` covers the
    device's shard only.

    Each device draws different random numbers. Summaries are reduced over the devices by their rule; totals and counts
    of losses are added. `fn` may write Variables that have logical axes; devices that hold the same shard must write
    the same value. The gradients of a `GradientState` are reduced by maximum over the devices that hold the same shard.

    Args:
        in_specs: a `PartitionSpec` of mesh axes for each argument, or a tree of them.
        out_specs: the same for the result.
        gather: mesh axes along which `fn` needs whole parameters and state, usually `"fsdp"`. They are all-gathered on
            entry, and gradients are reduce-scattered.
        layout: None: the active layout.

    Raises:
        ContextError: no layout is active, the call is inside another `shard_map`, or `fn` reports captured outputs or
            writes a Variable without axes.
        ConfigError: `gather` names an axis that the mesh does not have, or a Variable does not divide.
    """

    def wrapped(module: nnx.Module, *args: Any) -> Any:
        lifted = Lifted.of(module, "shard_map")
        here = _usable(layout, lifted)
        axes = tuple(here.mesh.axis_names)
        if unknown := [axis for axis in gather if axis not in axes]:
            raise ConfigError(f"gather names {', '.join(unknown)}; the mesh has {', '.join(axes)}")
        specs = [_specs(tree, here, frozenset(gather)) for tree in (lifted.params, lifted.state)]
        inside = dataclasses.replace(here, manual=True)

        def body(params: Any, state: Any, *args: Any) -> Any:
            state = _keep_largest(state, specs[1], here)
            with inside.active():
                output, state, collections = lifted.call(fn, params, state, *args, number=jax.lax.axis_index(axes))
            _refuse_written(lifted)
            if collections is not None and collections.outputs:
                raise ContextError(f"{', '.join(collections.outputs)}: outputs cannot be captured inside shard_map")
            return output, state, collections and jax.lax.all_gather(collections, axes).reduced()

        mapped = jax.shard_map(
            body,
            mesh=here.mesh,
            in_specs=(*specs, *in_specs),
            out_specs=(out_specs, specs[1], PartitionSpec()),
            check_vma=False,
        )
        output, state, collections = mapped(lifted.params, _as_read(lifted.state), *args)
        lifted.finish(state, collections)
        return output

    return wrapped


def _usable(layout: Layout | None, lifted: Lifted) -> Layout:
    where, active = lifted.caller.describe(), active_layout()
    if active is not None and active.manual:
        raise ContextError(f"{where} runs shard_map inside another, where the mesh is in use already")
    layout = layout if layout is not None else active
    if layout is None:
        raise ContextError(f"{where} runs shard_map, and no layout is active; call it inside `layout.active()`")
    return layout


def _specs(variables: Any, layout: Layout, gather: frozenset[str]) -> Any:
    """The partition spec of each Variable: that of its logical axes, without the mesh axes in `gather`."""

    def spec(path: Any, variable: nnx.Variable[Any]) -> PartitionSpec:
        value = variable.get_raw_value()
        found = layout.spec(axes_of(variable))
        for size, axes in zip(value.shape, found, strict=True):
            if size % layout.size_of(axes):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ConfigError(f"{name} of shape {value.shape} does not divide over {found} of {layout.mesh.shape}")
        return PartitionSpec(
            *(entry_of(tuple(axis for axis in group_of(axes) if axis not in gather)) for axes in found)
        )

    def held(path: Any, variable: nnx.Variable[Any]) -> Any:
        found = spec(path, variable)
        return jax.tree.map(lambda _: found, variable)  # specs replace the arrays inside the Variables

    return jax.tree.map_with_path(held, variables, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _refuse_written(lifted: Lifted) -> None:
    """Refuses writes to Variables without logical axes, which devices would overwrite with different values."""
    named = {path for path, variable in nnx.to_flat_state(lifted.state) if variable.get_metadata().get("axes")}
    if lost := sorted(".".join(map(str, path)) for path in lifted.written - named):
        raise ContextError(
            f"in {lifted.caller.describe()} a layer writes {', '.join(lost)} inside shard_map, and the Variable does "
            f"not name its axes; make it with axes=(...), or write it outside"
        )


def _as_read(state: Any) -> Any:
    """Converts `GradientState` to float32 outside the mapped function: collectives do not support `fm32`, the dtype in
    which the training step holds it."""

    def read(variable: Any) -> Any:
        if not isinstance(variable, GradientState):
            return variable
        value = variable[...]
        return jax.tree.map(lambda _: value, variable)

    return jax.tree.map(read, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _keep_largest(state: Any, specs: Any, layout: Layout) -> Any:
    """Reduces the gradients of each `GradientState` by maximum over the devices that hold the same shard, instead of
    adding them as jax does."""

    def guarded(variable: Any, spec: Any) -> Any:
        if not isinstance(variable, GradientState):
            return variable
        named = {axis for dimension in jax.tree.leaves(spec)[0] for axis in group_of(dimension)}
        over = tuple(axis for axis in layout.mesh.axis_names if axis not in named)
        return jax.tree.map(lambda x: _largest(x, over, math.prod(layout.mesh.shape[axis] for axis in over)), variable)

    return jax.tree.map(guarded, state, specs, is_leaf=lambda node: isinstance(node, nnx.Variable))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _largest(x: jax.Array, axes: tuple[str, ...], count: int) -> jax.Array:
    return x


def _largest_forward(x: jax.Array, axes: tuple[str, ...], count: int) -> tuple[jax.Array, None]:
    return x, None


def _largest_backward(axes: tuple[str, ...], count: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    """The transpose of shard_map adds the gradients of all devices, so each returns an equal share of the maximum."""
    return (jax.lax.pmax(g, axes) / count if axes else g,)


_largest.defvjp(_largest_forward, _largest_backward)
