"""The conformance suite of a recipe."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from axcore.module import abstract
from axcore.plugin import Recipe, recipe
from axcore.testing.models import loss_and_grads
from axcore.testing.offer import OfferSuite
from axcore.train import Trainer


class RecipeSuite(OfferSuite):
    """Checks of a recipe. The whole model is only traced; `shrink` makes one that is small enough to run.

    Attributes:
        largest: parameters of the shrunken model, at most.
    """

    kind = Recipe
    largest: ClassVar[int] = 5_000_000

    def config(self) -> Any:
        return recipe(self.name)

    def shrink(self, model: Any) -> Any:
        """A small model of the same parts. Override it for a recipe whose model is large."""
        return model

    def test_it_is_a_trainer_config_and_the_same_each_time(self) -> None:
        cfg = self.config()
        assert isinstance(cfg, Trainer.Config), f"a recipe returns a Trainer.Config, not {type(cfg).__name__}"
        assert cfg == self.config()

    def test_the_whole_model_traces(self) -> None:
        cfg = self.config()
        fn, params, state = abstract(cfg.model, "model")
        assert jax.tree.leaves(params)
        batch, objective = jax.eval_shape(lambda: self._batch(cfg.model)), cfg.objective.build()
        loss = jax.eval_shape(lambda params, batch: objective.value(fn, params, state, batch), params, batch)
        assert loss.shape == ()

    def test_a_small_model_of_its_kind_can_be_trained(self) -> None:
        small = self.shrink(self.config().model)
        count = sum(leaf.size for leaf in jax.tree.leaves(abstract(small)[1]))
        assert count <= self.largest, f"{count:,} parameters are too many for a test; override shrink()"
        loss, grads = loss_and_grads(small, lambda: self._batch(small))
        assert np.isfinite(loss)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))

    @staticmethod
    def _batch(model: Any) -> dict[str, jax.Array]:
        ids = jax.random.randint(jax.random.key(1), (2, 9), 0, model.vocab_size)
        return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": jnp.ones((2, 8))}
