"""The conformance suite of a recipe."""

from __future__ import annotations

from typing import ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from axcore.config import Config
from axcore.module import abstract
from axcore.nn import CausalLM
from axcore.plugin import Recipe, recipe
from axcore.testing.models import Batch, loss_and_grads
from axcore.testing.offer import OfferSuite
from axcore.train import Trainer


class RecipeSuite(OfferSuite):
    """Checks of a recipe. The full model is only traced; `shrink` returns the small model that the checks run.

    Attributes:
        largest: largest number of parameters of the small model.
    """

    kind = Recipe
    largest: ClassVar[int] = 5_000_000

    def config(self) -> Config:
        return recipe(self.name)

    def shrink(self, model: Config) -> Config:
        """A small model with the same kinds of layers. Override this method for a recipe with a large model."""
        return model

    def test_recipe_is_deterministic(self) -> None:
        assert self._trainer() == self._trainer()

    def test_the_full_model_can_be_traced(self) -> None:
        cfg = self._trainer()
        fn, params, state = abstract(cfg.model, "model")
        assert jax.tree.leaves(params)
        batch, objective = jax.eval_shape(lambda: self._batch(cfg.model)), cfg.objective.build()
        loss = jax.eval_shape(lambda params, batch: objective.value(fn, params, state, batch), params, batch)
        assert loss.shape == ()

    def test_a_small_model_can_be_trained(self) -> None:
        small = self.shrink(self._trainer().model)
        count = sum(leaf.size for leaf in jax.tree.leaves(abstract(small)[1]))
        assert count <= self.largest, (
            f"the small model has {count:,} parameters, at most {self.largest:,} are allowed; override shrink()"
        )
        loss, grads = loss_and_grads(small, lambda: self._batch(small))
        assert np.isfinite(loss)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))

    def _trainer(self) -> Trainer.Config:
        cfg = self.config()
        assert isinstance(cfg, Trainer.Config), f"a recipe must return a Trainer.Config, got {type(cfg).__name__}"
        return cfg

    @staticmethod
    def _batch(model: Config) -> Batch:
        vocab_size = cast(CausalLM.Config, model).vocab_size
        ids = jax.random.randint(jax.random.key(1), (2, 9), 0, vocab_size)
        return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": jnp.ones((2, 8))}
