"""The gradient of an objective, computed by a pipeline over the microbatches of a batch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PRNGKeyArray, PyTree

from axcore.module import Collections, Tree, overwrite_with_gradient, to_fm32
from axcore.train.step.accumulation import Counts, ObjectiveGradient, Result, key_of
from axcore.train.step.objective import Batch
from axcore.train.step.pipeline.chunk import Gradient, Variables, added, replaced
from axcore.train.step.pipeline.engine import Inputs, Stage, Sums
from axcore.train.step.pipeline.moves import to_layers, to_stages
from axcore.train.step.pipeline.parts import Hidden, Parts
from axcore.train.step.pipeline.stack import PipelinedStack
from axcore.train.step.subtrees import union


def pipelined(
    gradient: ObjectiveGradient,
    stack: PipelinedStack,
    model_state: Tree,
    batch: Batch,
    key: PRNGKeyArray,
    microbatches: int,
) -> Result:
    """The result of `gradient.accumulated`, with the layers of `stack` divided into the stages of the layout.

    The stages run the schedule of the layout in a `shard_map` over the mesh axis `pipeline`. The compiler handles the
    other axes as usual.
    """
    layout = gradient.layout
    assert layout.pipeline is not None
    table = layout.pipeline.table(layout.stages, microbatches)
    parts = Parts(gradient.fn, gradient.objective, stack, (union(gradient.trained, gradient.frozen), model_state))
    forward_state, gradient_state = gradient.forward_state(model_state), gradient.gradient_state(model_state)
    trees = (stack.divided(tree) for tree in (gradient.trained, gradient.frozen, forward_state, gradient_state))
    layers, rest = (Variables(*each) for each in zip(*trees, strict=True))
    likes = stack.divided(gradient.sums_like)
    batches = gradient.split(batch, microbatches)

    def before(trained: Tree, gradient_state: Tree) -> tuple[Hidden, tuple[PyTree, ...]]:
        """The inputs of the layers for all microbatches."""
        params, state = union(trained, rest.frozen), union(rest.forward_state, gradient_state)

        def of_microbatch(numbered: tuple[jax.Array, Batch]) -> tuple[Hidden, tuple[PyTree, ...]]:
            return parts.before(params, state, numbered[1], key_of(key, numbered[0]))

        return jax.lax.map(of_microbatch, (jnp.arange(microbatches), batches))

    def body(
        layers: Variables, rest: Variables, inputs: Inputs, key: PRNGKeyArray, counts: Counts
    ) -> tuple[Sums, Sums, Hidden]:
        move = functools.partial(to_stages, stages=layout.stages, chunks=table.chunks)
        with layout.inside({"pipeline"}).active():
            stage = Stage(parts, table, jax.tree.map(move, layers), rest, inputs, key, counts, likes)
            found, of_rest, gx = stage.run()
            found = jax.tree.map(functools.partial(to_layers, stages=layout.stages), found)
        return (
            found._replace(written=replaced(layers.forward_state, stage.chunk.written, found.written)),
            of_rest._replace(written=replaced(rest.forward_state, stage.written, of_rest.written)),
            gx,
        )

    of_stage, everywhere = PartitionSpec("pipeline"), PartitionSpec()
    run = jax.shard_map(
        body,
        mesh=layout.mesh,
        axis_names={"pipeline"},
        in_specs=(of_stage, everywhere, everywhere, everywhere, everywhere),
        out_specs=(of_stage, everywhere, everywhere),
        check_vma=False,
    )
    x, pull, args = jax.vjp(before, rest.trained, to_fm32(rest.gradient_state), has_aux=True)
    inputs, counts = Inputs(batches, x, args), gradient.counts(model_state, batches, key)
    found, of_rest, gx = run(layers, rest, inputs, key, counts)
    of_rest = of_rest._replace(gradient=added(of_rest.gradient, *pull(gx)))
    by_microbatch = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found.reports)
    loss, reports = of_rest.reports
    reports = Collections({**by_microbatch.summaries, **reports.summaries}, {**by_microbatch.losses, **reports.losses})
    whole = Gradient(*map(stack.whole, found.gradient, of_rest.gradient))
    return Result(
        grads=jax.tree.map(lambda total, like: total.astype(like.dtype), whole.trained, gradient.sums_like),
        loss=jax.tree.map(lambda x: x.sum(axis=0), loss),
        collections=reports.reduced(),
        model_state=stack.whole(found.written, of_rest.written),
        gradient_state=overwrite_with_gradient(whole.gradient_state, gradient_state),
    )
