"""One stage of a pipeline: a loop over the ticks of a schedule, inside a `shard_map` over the mesh axis `pipeline`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from axcore.module import Collections, LossSum, Tree, to_fm32
from axcore.nn.transformer import HIDDEN
from axcore.parallel import constrain, is_sharded
from axcore.parallel.axes import entry_of, group_of
from axcore.parallel.pipeline import Table
from axcore.train.step.accumulation import Counts, key_of
from axcore.train.step.objective import Batch
from axcore.train.step.pipeline.chunk import Call, Chunk, Gradient, Variables, added, changed, leaves_at, replaced
from axcore.train.step.pipeline.indexing import at, put
from axcore.train.step.pipeline.parts import Hidden, Parts
from axcore.train.step.subtrees import subtree, union


class Inputs(NamedTuple):
    """What the layers and the loss of a microbatch take."""

    batch: Batch
    x: Hidden
    """The input of the first layer."""
    args: tuple[PyTree, ...]
    """The further arguments of every layer."""


class Sums(NamedTuple):
    """The results summed over microbatches, for the layers of a stage or for the rest of the model.

    Attributes:
        gradient: sums of gradients, and the largest cotangents of `GradientState`.
        written: the Variables that are written, with their values after the last microbatch.
        reports: the reports of each microbatch.
    """

    gradient: Gradient
    written: PyTree
    reports: PyTree


class Buffers(NamedTuple):
    """Values that wait for a task, in arrays [slot, ...]; `residuals` and `stash` are [slot, layer, ...]. See
    `Table`."""

    x: PyTree
    g: PyTree
    residuals: PyTree
    stash: PyTree


class Carry(NamedTuple):
    """What a stage carries from tick to tick.

    Attributes:
        layers: [chunk, ...]; reports [chunk, microbatch, layer, ...].
        rest: reports [microbatch, ...].
    """

    buffers: Buffers
    layers: Sums
    rest: Sums
    gx: Hidden
    """The gradient of `Inputs.x`."""


class Task(NamedTuple):
    """One entry of a table."""

    op: Int[Array, ""]
    microbatch: Int[Array, ""]
    chunk: Int[Array, ""]
    x: Int[Array, ""]
    g: Int[Array, ""]
    residuals: Int[Array, ""]
    stash: Int[Array, ""]
    x_arrives: Int[Array, ""]
    g_arrives: Int[Array, ""]


class Stage:
    """One stage. It is created while the `shard_map` is traced."""

    def __init__(
        self,
        parts: Parts,
        table: Table,
        layers: Variables,
        rest: Variables,
        inputs: Inputs,
        key: PRNGKeyArray,
        counts: Counts,
        likes: tuple[Tree, Tree],
    ):
        """
        Args:
            layers: the Variables of the layers that the stage runs [chunk, layer, ...].
            rest: the Variables of the rest of the model.
            inputs: [microbatch, ...].
            key: the key of the step.
            counts: the counts of the whole batch.
            likes: shapes, dtypes and shardings of the trained parameters of all layers, and of the rest of the model.
        """
        self.parts, self.table, self.layers, self.rest = parts, table, layers, rest
        self.inputs, self.key, self.counts = inputs, key, counts
        self.number, self.stages = jax.lax.axis_index("pipeline"), table.op.shape[1]
        self.chunks, self.layers_per_chunk = jax.tree.leaves(layers)[0].shape[:2]
        self.likes, self.written = likes, tuple[int, ...]()

    def run(self) -> tuple[Sums, Sums, Hidden]:
        """(sums of the layers, sums of the rest of the model, gradient of the inputs of the first layer). The last two
        are equal on all stages."""
        rows = Task(**{name: jnp.asarray(getattr(self.table, name)) for name in Task._fields})
        carry, _ = jax.lax.scan(self._tick, self._start(), rows)
        rest, is_last = carry.rest, self.number == self.stages - 1
        return carry.layers, Sums(*(_broadcast(is_last, each) for each in rest)), _broadcast(self.number == 0, carry.gx)

    def _tick(self, carry: Carry, row: Task) -> tuple[Carry, None]:
        task = Task(*at(tuple(row), self.number))
        tasks = (self._idle, self._forward, self._backward, self._weight)
        carry, y, g = jax.lax.switch(task.op, tasks, carry, task)
        ring = [(stage, (stage + 1) % self.stages) for stage in range(self.stages)]
        x = jax.lax.ppermute(y, "pipeline", ring)
        g = jax.lax.ppermute(g, "pipeline", [(to, stage) for stage, to in ring])
        buffers = carry.buffers
        buffers = buffers._replace(x=put(buffers.x, x, task.x_arrives), g=put(buffers.g, g, task.g_arrives))
        return carry._replace(buffers=buffers), None

    def _idle(self, carry: Carry, task: Task) -> tuple[Carry, Hidden, Hidden]:
        return carry, self._zero_hidden(), self._zero_hidden()

    def _forward(self, carry: Carry, task: Task) -> tuple[Carry, Hidden, Hidden]:
        buffers, layers = carry.buffers, carry.layers
        is_first = (self.number == 0) & (task.chunk == 0)
        x = jax.lax.cond(
            is_first, lambda: _sharded(at(self.inputs.x, task.microbatch)), lambda: _sharded(at(buffers.x, task.x))
        )
        y, new, residuals, reports = self.chunk.forward(
            self.layers, x, self._call(task), at(layers.written, task.chunk), buffers.residuals
        )
        buffers = buffers._replace(
            residuals=residuals,
            g=put(buffers.g, y, task.g),  # the loss reads the output of the last chunk; elsewhere the slot is unused
        )

        def report(found: jax.Array, new: jax.Array) -> jax.Array:
            start = [task.chunk, jnp.int32(0), task.microbatch, *[jnp.int32(0)] * (found.ndim - 3)]
            return jax.lax.dynamic_update_slice(found, new[None, :, None].astype(found.dtype), start)

        layers = layers._replace(
            written=put(layers.written, new, task.chunk), reports=jax.tree.map(report, layers.reports, reports)
        )
        return carry._replace(buffers=buffers, layers=layers), _sharded(y), self._zero_hidden()

    def _backward(self, carry: Carry, task: Task) -> tuple[Carry, Hidden, Hidden]:
        buffers, rest = carry.buffers, carry.rest
        is_first = (self.number == 0) & (task.chunk == 0)
        is_last = (self.number == self.stages - 1) & (task.chunk == self.chunks - 1)
        rest, g = jax.lax.cond(
            is_last, self._loss, lambda rest, g, _: (rest, _sharded(g)), rest, at(buffers.g, task.g), task
        )
        g, stash = self.chunk.backward(self.layers, buffers.residuals, self._call(task), g, buffers.stash)
        buffers = buffers._replace(stash=stash)
        gx = jax.lax.cond(is_first, lambda gx: put(gx, g, task.microbatch), lambda gx: gx, carry.gx)
        return Carry(buffers, carry.layers, rest, gx), self._zero_hidden(), _sharded(g)

    def _weight(self, carry: Carry, task: Task) -> tuple[Carry, Hidden, Hidden]:
        residuals, stash = carry.buffers.residuals, carry.buffers.stash
        sums = self.chunk.weights(self.layers, residuals, self._call(task), stash, carry.layers.gradient)
        return carry._replace(layers=carry.layers._replace(gradient=sums)), self._zero_hidden(), self._zero_hidden()

    def _loss(self, rest: Sums, y: Hidden, task: Task) -> tuple[Sums, Hidden]:
        """The sums with the loss of a microbatch, and the gradient of the output of the last layer."""

        def value(trained: Tree, gradient_state: Tree, y: Hidden) -> tuple[jax.Array, PyTree]:
            own = self.rest._replace(trained=trained, gradient_state=gradient_state)
            written, loss, reports = self._after(own, rest.written, y, task)
            return loss.mean(self.counts.loss) + reports.total_loss(self.counts.others), (written, (loss, reports))

        value_of, pull, (written, reports) = jax.vjp(value, *self._differentiated(self.rest), y, has_aux=True)
        *found, g = pull(jnp.ones_like(value_of))
        return Sums(added(rest.gradient, *found), written, put(rest.reports, reports, task.microbatch)), _sharded(g)

    def _after(
        self, rest: Variables, written: list[jax.Array], y: Hidden, task: Task
    ) -> tuple[list[jax.Array], LossSum, Collections]:
        forward_state = replaced(rest.forward_state, self.written, written)
        params, state = union(rest.trained, rest.frozen), union(forward_state, rest.gradient_state)
        loss, reports, new = self.parts.after(params, state, at(self.inputs.batch, task.microbatch), self._key(task), y)
        marks = self.parts.stack.divided(self.parts.fn.gradient_state)[1]
        new = subtree(new, marks, lambda is_gradient_state: not is_gradient_state)
        self.written = changed(new, forward_state)
        return leaves_at(new, self.written), loss, reports

    def _call(self, task: Task) -> Call:
        first = (task.chunk * self.stages + self.number) * self.layers_per_chunk
        above = f"{self.parts.stack.path}.{self.parts.stack.place}.*."
        counts = {path: count for path, count in self.counts.others.items() if path.startswith(above)}
        args = at(self.inputs.args, task.microbatch)
        return Call(args, task.chunk, first, self._key(task), counts, task.residuals, task.stash)

    def _key(self, task: Task) -> PRNGKeyArray:
        return key_of(self.key, task.microbatch)

    def _zero_hidden(self) -> Hidden:
        return _sharded(_zeros(self.x))

    def _differentiated(self, variables: Variables) -> tuple[Tree, Tree]:
        return variables.trained, to_fm32(variables.gradient_state)

    def _start(self) -> Carry:
        zero = Task(*(jnp.int32(0),) * len(Task._fields))
        self.x = jax.eval_shape(lambda: at(self.inputs.x, 0))
        self.chunk = Chunk(self.parts, self.layers, self.x, self._call(zero))
        shapes = jax.eval_shape(lambda y: self._after(self.rest, [], y, zero)[1:], self.x)
        table = self.table
        buffers = Buffers(
            x=_sharded(_zeros(self.x, table.num_x + 1), None),
            g=_sharded(_zeros(self.x, table.num_g + 1), None),
            residuals=_zeros(self.chunk.residuals, table.num_residuals + 1, self.layers_per_chunk),
            stash=_zeros(self.chunk.stash, table.num_stash + 1, self.layers_per_chunk),
        )
        microbatches = jax.tree.leaves(self.inputs.batch)[0].shape[0]

        def of_layers(report: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((self.chunks, self.layers_per_chunk, microbatches, *report.shape), report.dtype)

        return Carry(
            buffers,
            Sums(
                self._no_gradient(self.likes[0], self.layers, (self.chunks, self.layers_per_chunk)),
                leaves_at(self.layers.forward_state, self.chunk.written),
                jax.tree.map(of_layers, self.chunk.reports),
            ),
            Sums(
                self._no_gradient(self.likes[1], self.rest, ()),
                leaves_at(self.rest.forward_state, self.written),
                _zeros(shapes, microbatches),
            ),
            _sharded(_zeros(self.x, microbatches), None),
        )

    def _no_gradient(self, likes: Tree, variables: Variables, leading: tuple[int, ...]) -> Gradient:
        """Zero accumulators, with the `leading` axes in place of the axis over all layers."""

        def zeros(like: jax.ShapeDtypeStruct, own: jax.Array) -> jax.Array:
            found = jnp.zeros(own.shape, jnp.promote_types(own.dtype, jnp.float32))
            if not is_sharded():
                return found
            spec = [
                entry_of(tuple(axis for axis in group_of(axes) if axis != "pipeline")) for axes in like.sharding.spec
            ]
            spec = [*(None,) * len(leading), *spec[1 if leading else 0 :]]
            sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*spec))
            return jax.lax.with_sharding_constraint(found, sharding)

        lowest = jax.tree.map(lambda own: jnp.full(own.shape, -jnp.inf, jnp.float32), variables.gradient_state)
        return Gradient(jax.tree.map(zeros, likes, variables.trained), lowest)


def _zeros(like: PyTree, *leading: int) -> PyTree:
    """Zeros of these shapes with further leading axes."""
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), like)


def _sharded(x: Hidden, *leading: None) -> Hidden:
    """Shards hidden states [*leading, batch, seq, embed] like those inside the layers.

    The branches of a conditional must agree on the sharding of their results.
    """
    size = len(leading)
    return jax.tree.map(lambda leaf: constrain(leaf, *leading, *HIDDEN) if leaf.ndim == size + 3 else leaf, x)


def _broadcast(is_source: Bool[Array, ""], tree: PyTree) -> PyTree:
    """Broadcasts the arrays of the stage where `is_source` is true to all stages."""

    def found(x: jax.Array) -> jax.Array:
        total = jax.lax.psum(jnp.where(is_source, x, jnp.zeros_like(x)), "pipeline")
        return total.astype(x.dtype)

    return jax.tree.map(found, tree)
