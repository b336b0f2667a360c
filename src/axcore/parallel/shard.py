"""`jax.shard_map` of functions that call layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from axcore.module import Collections, ContextError, Reduce
from axcore.module.lifted import Lifted, refuse_written

Body = Callable[..., Any]


def shard_map(fn: Body, *, mesh: Mesh, in_specs: Sequence[Any], out_specs: Any) -> Body:
    """`jax.shard_map` over the arguments; each device sees its shards and the whole module.

    Each device draws PRNG bits of its own. Summaries are reduced over the devices by their rule, losses by their mean.
    Writing a Variable is an error.
    """

    def wrapped(module: nnx.Module, *args: Any) -> Any:
        lifted = Lifted.of(module, "shard_map")
        axes = tuple(mesh.axis_names)

        def body(params: Any, state: Any, *args: Any) -> Any:
            output, new_state, collections = lifted.call(fn, params, state, *args, salt=jax.lax.axis_index(axes))
            refuse_written(dataclasses.replace(lifted, state=state), new_state, "shard_map")
            return output, _over_devices(collections, axes)

        whole = PartitionSpec()
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(whole, whole, *in_specs), out_specs=(out_specs, whole), check_vma=False
        )
        output, collections = mapped(lifted.params, lifted.state, *args)
        lifted.finish(lifted.state, collections)
        return output

    return wrapped


def _over_devices(collections: Collections | None, axes: tuple[str, ...]) -> Collections | None:
    if collections is None:
        return None
    over = {Reduce.MEAN: jax.lax.pmean, Reduce.SUM: jax.lax.psum, Reduce.MAX: jax.lax.pmax, Reduce.MIN: jax.lax.pmin}
    summaries = {
        path: dataclasses.replace(summary, value=over.get(summary.reduce, jax.lax.pmax)(summary.value, axes))
        for path, summary in collections.summaries.items()
    }
    losses = {path: jax.lax.pmean(loss, axes) for path, loss in collections.losses.items()}
    if collections.outputs:
        raise ContextError(f"{', '.join(collections.outputs)}: outputs cannot be captured inside shard_map")
    return Collections(summaries, losses)
