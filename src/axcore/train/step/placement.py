"""Where the arrays of a training state are: their shardings, and their memory."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from axcore.module import Tree
from axcore.parallel import Layout
from axcore.parallel.axes import entry_of, group_of
from axcore.train.step.parts import like_params


def moment_shardings(layout: Layout, params: Tree, placed: Tree) -> Tree:
    """The sharding on the devices of the optimizer state of each parameter.

    With ZeRO, it is also sharded over the mesh axes of the batch that hold copies of the parameter, in its largest
    dimension that is divisible.

    Args:
        params: shapes of the parameters.
        placed: sharding of each parameter.
    """
    return jax.tree.map(lambda param, sharding: _without_replicas(layout, param, sharding), params, placed)


def _without_replicas(layout: Layout, param: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
    if not layout.zero:
        return sharding
    spec = [group_of(entry) for entry in sharding.spec]
    used = {axis for group in spec for axis in group}
    free = tuple(axis for axis in layout.axes_of("batch") if axis not in used)
    local = [size // layout.size_of(group) for size, group in zip(param.shape, spec, strict=True)]
    while free:
        divisible = [index for index, size in enumerate(local) if size % layout.size_of(free) == 0]
        if divisible:
            largest = max(divisible, key=local.__getitem__)
            spec[largest] += free
            return NamedSharding(layout.mesh, PartitionSpec(*map(entry_of, spec)))
        free = free[:-1]
    return sharding


def optimizer_shardings(layout: Layout, state: Any, params: Tree, moments: Tree) -> Any:  # Any: an optax state
    """The sharding of each array of the optimizer state, in the memory where it is between steps.

    Args:
        state: shapes of the state.
        params: shapes of the parameters.
        moments: see `moment_shardings`.
    """
    if layout.optimizer_memory == "host":
        moments = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), moments)
    return like_params(state, params, moments, layout.sharding())


def on_devices(grads: Tree, state: Any, like: Any) -> tuple[Tree, Any]:  # Any: an optax state
    """The gradients, and the optimizer state in device memory.

    State in host memory is moved after the gradients are computed. Otherwise XLA moves it at the start of the step,
    and device memory holds it together with the activations.

    Args:
        like: shapes and shardings of the state.
    """
    if not any(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(like)):
        return grads, state
    grads, state = jax.lax.optimization_barrier((grads, state))

    def moved(leaf: jax.Array, form: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(leaf, form.sharding.with_memory_kind("device"))

    return grads, jax.tree.map(moved, state, like)
