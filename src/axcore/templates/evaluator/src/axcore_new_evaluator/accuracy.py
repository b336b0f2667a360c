"""Accuracy of next-token prediction."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import axcore as ax
from axcore.module import Tree
from axcore.train import Evaluator, RunInfo, Snapshot


class Accuracy(Evaluator):
    """`accuracy`: the share of validation tokens that are among the `top` most likely ones."""

    class Config(Evaluator.Config):
        top: ax.PositiveInt = 1

    config: Config

    def start(self, run: RunInfo) -> None:
        """Defines the jitted function, which is compiled at the first evaluation."""

        @jax.jit
        def count(params: Tree, state: Tree, batch: Mapping[str, Array]) -> tuple[Float[Array, ""], Float[Array, ""]]:
            module = run.program.fn.bind(params, state)
            logits = module(batch["inputs"], positions=batch["positions"], segment_ids=batch["segment_ids"])
            target = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)
            correct = (logits > target).sum(-1) < self.config.top
            return (correct * batch["weights"]).sum(), batch["weights"].sum()

        self.count = count

    def __call__(self, model: Snapshot) -> Mapping[str, float]:
        """See `Evaluator`."""
        correct, total = 0.0, 0.0
        with model.program.layout.active():  # the model is sharded as it is in training
            for batch in model.validation_batches():
                right, weight = self.count(model.params(), model.state.model_state, batch)
                correct, total = correct + float(right), total + float(weight)
        return {"accuracy": correct / total}
