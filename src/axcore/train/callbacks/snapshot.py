"""The view of a model that evaluators receive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
from jaxtyping import Array, Float, Num

from axcore.module import Layer, Tree
from axcore.train.data import Input
from axcore.train.step.program import Program, TrainState

Batch = Mapping[str, Num[Array, "..."]]
EvalStep = Callable[[Tree, Tree, Batch], tuple[Float[Array, ""], Float[Array, ""]]]


class EvaluationAbandoned(Exception):
    """A signal arrived during an evaluation."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A model at one step of a run. Every process must run the same computations on it, in the same order.

    Attributes:
        step: steps done.
        state: the training state.
        input: the input of the run, with its validation batches.
        check: called between batches. Raises `EvaluationAbandoned` to end the evaluation.
    """

    step: int
    state: TrainState
    input: Input
    program: Program
    eval_step: EvalStep
    check: Callable[[], None]

    def params(self, callback: str | None = None) -> Tree:
        """The model's parameters, or those under `params` in the device state of a callback, in the model's dtypes."""
        if callback is None:
            return self.state.params
        kept = self.state.callbacks[callback]["params"]
        cast: Tree = jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), kept, self.state.params)
        return cast

    def validation_batches(self) -> Iterator[Batch]:
        """Global validation batches, placed on the devices."""
        for batch in self.input.validation_batches():
            self.check()
            yield self.program.place(batch)

    def loss(self, batch: Batch, params: Tree | None = None) -> tuple[jax.Array, jax.Array]:
        """(total, count) of the objective on a global batch. `params` defaults to the parameters in the state."""
        return self.eval_step(self.state.params if params is None else params, self.state.model_state, batch)

    def model(self, params: Tree | None = None) -> Layer:
        """The module with its arrays, for other computations of an evaluator."""
        return self.program.fn.bind(self.state.params if params is None else params, self.state.model_state)
