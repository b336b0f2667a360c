"""`jax.shard_map` of functions that call layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from axcore.module import ContextError
from axcore.module.lifted import Lifted

Body = Callable[..., Any]


def shard_map(fn: Body, *, mesh: Mesh, in_specs: Sequence[Any], out_specs: Any) -> Body:
    """`jax.shard_map` over the arguments; each device sees its shards and the whole module.

    Each device draws PRNG bits of its own. Summaries are reduced over the devices by their rule, totals and counts of
    losses add up. Writing a Variable is an error.
    """

    def wrapped(module: nnx.Module, *args: Any) -> Any:
        lifted = Lifted.of(module, "shard_map")
        axes = tuple(mesh.axis_names)

        def body(params: Any, state: Any, *args: Any) -> Any:
            output, _, collections = lifted.call(fn, params, state, *args, number=jax.lax.axis_index(axes))
            lifted.refuse_written("shard_map")
            if collections is not None and collections.outputs:
                raise ContextError(f"{', '.join(collections.outputs)}: outputs cannot be captured inside shard_map")
            return output, collections and jax.lax.all_gather(collections, axes).reduced()

        whole = PartitionSpec()
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(whole, whole, *in_specs), out_specs=(out_specs, whole), check_vma=False
        )
        output, collections = mapped(lifted.params, lifted.state, *args)
        lifted.finish(lifted.state, collections)
        return output

    return wrapped
