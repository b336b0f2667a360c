"""The placement of the arrays of a training state: their shardings and memory kinds."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from axcore.module import Tree
from axcore.parallel import Layout
from axcore.parallel.axes import entry_of, group_of
from axcore.train.step.subtrees import like_params


def moment_shardings(layout: Layout, params: Tree, shardings: Tree) -> Tree:
    """The sharding of the optimizer state of each parameter while it is on the devices.

    With ZeRO, its largest divisible dimension is also sharded over those mesh axes of the batch along which the
    parameter is replicated.

    Args:
        params: shapes of the parameters.
        shardings: sharding of each parameter.
    """
    return jax.tree.map(lambda param, sharding: _zero_sharding(layout, param, sharding), params, shardings)


def _zero_sharding(layout: Layout, param: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
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
    """The sharding of each array of the optimizer state, with the memory in which it is kept between steps.

    Args:
        state: shapes of the state.
        params: shapes of the parameters.
        moments: see `moment_shardings`.
    """
    if layout.optimizer_memory == "host":
        moments = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), moments)
    return like_params(state, params, moments, layout.sharding())


def on_devices(grads: Tree, state: Any, like: Any) -> tuple[Tree, Any]:  # Any: an optax state
    """The gradients, and the optimizer state, which is moved to device memory if it is in host memory.

    The state is moved after the gradients are computed. XLA would otherwise move it at the start of the step, where it
    would take device memory together with the activations.

    Args:
        like: shapes and shardings of the state.
    """
    if not any(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(like)):
        return grads, state
    grads, state = jax.lax.optimization_barrier((grads, state))

    def move(leaf: jax.Array, form: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(leaf, form.sharding.with_memory_kind("device"))

    return grads, jax.tree.map(move, state, like)
