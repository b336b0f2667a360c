"""Gradients of an objective over a batch, computed at once or accumulated over microbatches."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int, PRNGKeyArray

from axcore.config import ConfigError
from axcore.module import Collections, Functional, LossSum, Tree, fold, overwrite_with_gradient, to_fm32
from axcore.parallel import Layout
from axcore.train.step.objective import Batch, Objective
from axcore.train.step.subtrees import subtree, union


class Counts(NamedTuple):
    """The counts of a whole batch: the count of the objective, and the count of each added loss by path."""

    loss: Float[Array, ""]
    others: dict[str, jax.Array]


class Result(NamedTuple):
    """Gradients and reports of a batch or microbatch.

    Attributes:
        grads: gradients of the trained parameters, in their dtypes.
        loss: the result of the objective.
        collections: summaries and added losses.
        model_state: the new values of the Variables other than `GradientState`.
        gradient_state: the next values of the `GradientState` leaves.
    """

    grads: Tree
    loss: LossSum
    collections: Collections
    model_state: Tree
    gradient_state: Tree


def key_of(key: PRNGKeyArray, number: Int[Array, ""]) -> PRNGKeyArray:
    """The key of a microbatch, given the key of the step."""
    return fold(fold(key, "microbatch"), number)


@dataclasses.dataclass(frozen=True)
class ObjectiveGradient:
    """The gradient of an objective with respect to the trained parameters.

    Attributes:
        fn: the model.
        objective: the training loss.
        layout: the mesh and rules of the run.
        trained, frozen: the parameters with and without gradients.
        params_like: shapes, dtypes and shardings of the trained parameters.
        sums_like: shapes, dtypes and shardings of accumulated gradients.
    """

    fn: Functional
    objective: Objective
    layout: Layout
    trained: Tree
    frozen: Tree
    params_like: Tree
    sums_like: Tree

    def whole(self, model_state: Tree, batch: Batch, key: PRNGKeyArray) -> Result:
        """The gradients of a batch, computed at once."""
        return self._one(model_state, batch, key, None)

    def accumulated(self, model_state: Tree, batch: Batch, key: PRNGKeyArray, microbatches: int) -> Result:
        """The gradients of a batch, computed one microbatch after another. The result equals that of `whole`.

        Gradients are summed in float32. Each microbatch draws different random numbers, and layers write their
        Variables once per microbatch. Summaries are reduced by their reduction, and `GradientState` by the elementwise
        maximum.
        """
        batches = self.split(batch, microbatches)
        counts = self.counts(model_state, batches, key)
        old_gradient_state = self.gradient_state(model_state)

        def add(
            carry: tuple[Tree, Tree], numbered: tuple[jax.Array, Batch]
        ) -> tuple[tuple[Tree, Tree], tuple[LossSum, Collections, Tree]]:
            sums, forward_state = carry
            of_microbatch = key_of(key, numbered[0])
            found = self._one(union(forward_state, old_gradient_state), numbered[1], of_microbatch, counts)
            sums = jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, found.grads)
            return (sums, found.model_state), (found.loss, found.collections, found.gradient_state)

        start = jax.tree.map(self._zeros, self.sums_like), self.forward_state(model_state)
        numbered = jnp.arange(microbatches), batches
        (sums, forward_state), (losses, collections, gradient_state) = jax.lax.scan(add, start, numbered)
        return Result(
            grads=jax.tree.map(lambda total, like: total.astype(like.dtype), sums, self.params_like),
            loss=jax.tree.map(lambda x: x.sum(axis=0), losses),
            collections=collections.reduced(),
            model_state=forward_state,
            gradient_state=jax.tree.map(lambda x: x.max(axis=0), gradient_state),
        )

    def split(self, batch: Batch, microbatches: int) -> Batch:
        """Arrays [batch, ...] -> [microbatches, rows, ...]. A microbatch takes every `microbatches`-th row, so that no
        row moves to another device."""

        def split(x: jax.Array) -> jax.Array:
            x = rearrange(x, "(r k) ... -> k r ...", k=microbatches)
            if self.layout.mesh.size == 1:
                return x
            return jax.lax.with_sharding_constraint(x, self.layout.sharding(None, *("batch", "seq")[: x.ndim - 1]))

        return {name: split(x) for name, x in batch.items()}

    def counts(self, model_state: Tree, batches: Batch, key: PRNGKeyArray) -> Counts:
        """The counts of a whole batch, given its microbatches."""

        def count(
            numbered: tuple[jax.Array, Batch],
        ) -> Counts:  # XLA removes the parts of this forward pass that no count depends on
            (loss, collections), _ = self._call(self.trained, model_state, numbered[1], key_of(key, numbered[0]))
            return Counts(loss.count, {path: each.count for path, each in collections.losses.items()})

        numbers = jnp.arange(jax.tree.leaves(batches)[0].shape[0])
        counts: Counts = jax.tree.map(lambda x: x.sum(axis=0), jax.lax.map(count, (numbers, batches)))
        return counts

    def forward_state(self, model_state: Tree) -> Tree:
        """The Variables other than `GradientState`, which the forward pass may write."""
        return subtree(model_state, self.fn.gradient_state, lambda is_gradient_state: not is_gradient_state)

    def gradient_state(self, model_state: Tree) -> Tree:
        """The `GradientState` Variables, which the backward pass updates."""
        return subtree(model_state, self.fn.gradient_state, lambda is_gradient_state: bool(is_gradient_state))

    def _one(self, model_state: Tree, batch: Batch, key: PRNGKeyArray, counts: Counts | None) -> Result:
        forward_state = self.forward_state(model_state)

        def minimized(trained: Tree, gradient_state: Tree) -> tuple[jax.Array, tuple[LossSum, Collections, Tree]]:
            (loss, collections), new_state = self._call(trained, union(forward_state, gradient_state), batch, key)
            if counts is None:
                value = loss.mean() + collections.total_loss()
            else:
                value = loss.mean(counts.loss) + collections.total_loss(counts.others)
            return value, (loss, collections, self.forward_state(new_state))

        old = self.gradient_state(model_state)
        differentiate = jax.grad(minimized, argnums=(0, 1), has_aux=True, allow_int=True)
        (grads, found), (loss, collections, forward_state) = differentiate(self.trained, to_fm32(old))
        return Result(grads, loss, collections, forward_state, overwrite_with_gradient(found, old))

    def _call(
        self, trained: Tree, model_state: Tree, batch: Batch, key: PRNGKeyArray
    ) -> tuple[tuple[LossSum, Collections], Tree]:
        params = union(self._in_place(trained), self.frozen)
        result = self.fn(params, model_state, batch, key=key, training=True, method=self.objective)
        loss = result[0][0]
        if not isinstance(loss, LossSum) or jnp.shape(loss.total) != () or jnp.shape(loss.count) != ():
            raise ConfigError(
                f"objective: {type(self.objective).__name__} must return a LossSum of two scalars, "
                f"not {jax.tree.map(jax.typeof, loss)}"
            )
        return result

    def _in_place(self, trained: Tree) -> Tree:
        """The parameters, whose gradients first have their sharding and then, with ZeRO, that of the optimizer state.

        Without this step, XLA (jax 0.11.2) returns wrong gradients of output projections with ZeRO and sequence
        parallelism over `context` and `tensor`: the operands of this product share tokens over different mesh axes.
        """
        if not self.layout.zero:
            return trained
        shardings = jax.tree.map(lambda like: like.sharding, self.params_like)
        return jax.lax.with_sharding_constraint(trained, shardings)

    def _zeros(self, like: jax.ShapeDtypeStruct) -> jax.Array:
        zeros = jnp.zeros(like.shape, jnp.promote_types(like.dtype, jnp.float32))
        return zeros if self.layout.mesh.size == 1 else jax.lax.with_sharding_constraint(zeros, like.sharding)
