"""The conformance suite of a recipe."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.config import Config, content_hash
from axcore.infer import Engine
from axcore.module import Rngs, abstract
from axcore.nn import CausalLM
from axcore.plugin import Recipe, recipe
from axcore.testing.causality import check_causality
from axcore.testing.engine import check_logprobs
from axcore.testing.models import Batch, by_path, loss_and_grads, shrunk
from axcore.testing.offer import OfferSuite
from axcore.train import Trainer
from axcore.train.checkpoint.model_folder import write_config

_READ = """
import sys
from axcore.config import content_hash
from axcore.train.checkpoint.model_folder import ModelFolder
print(content_hash(ModelFolder.open(sys.argv[1]).cfg))
"""


class RecipeSuite(OfferSuite):
    """Checks of a recipe. The full model is only traced; `shrink` returns the small model that the checks run.

    Attributes:
        largest: largest number of parameters of the small model.
        causal: whether the logits of a token do not depend on later tokens.
    """

    kind = Recipe
    largest: ClassVar[int] = 5_000_000
    causal: ClassVar[bool] = True

    def config(self) -> Config:
        return recipe(self.name)

    def shrink(self, model: Config) -> Config:
        """A small model with the same kinds of layers. Override this method for a recipe with a large model."""
        return model

    def test_recipe_is_deterministic(self) -> None:
        assert self._trainer() == self._trainer()

    def test_a_new_process_can_read_the_config_of_a_run(self) -> None:
        """As `axcore generate RUN` does: it imports the plugins that the config requires, and nothing else."""
        cfg = self._trainer()
        with tempfile.TemporaryDirectory() as folder:
            write_config(pathlib.Path(folder), cfg)
            done = subprocess.run([sys.executable, "-c", _READ, folder], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"a new process cannot read config.json: {done.stderr}"
        assert done.stdout.strip() == content_hash(cfg), "a new process reads another config from config.json"

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
        assert np.isfinite(loss), f"the loss is {loss}"
        bad = [path for path, leaf in by_path(grads).items() if not np.isfinite(leaf).all()]
        assert not bad, f"the gradients of {bad} contain NaN or infinities"

    def test_later_tokens_do_not_change_logits(self) -> None:
        if not self.causal:
            pytest.skip("causal is False")
        small = self.shrink(self._trainer().model)
        check_causality(small, self._batch(small)["inputs"], cast(CausalLM.Config, small).vocab_size)

    def test_an_engine_gives_the_log_probabilities_of_training(self) -> None:
        """The sizes of the model are those of `shrunk`."""
        if not self.causal:
            pytest.skip("causal is False")
        small = shrunk(self._trainer().model)
        check_logprobs(small.build(rngs=Rngs(0)), Engine.Config(max_len=32, max_rows=2, step_tokens=16))

    def _trainer(self) -> Trainer.Config:
        cfg = self.config()
        assert isinstance(cfg, Trainer.Config), f"a recipe must return a Trainer.Config, got {type(cfg).__name__}"
        return cfg

    @staticmethod
    def _batch(model: Config) -> Batch:
        vocab_size = cast(CausalLM.Config, model).vocab_size
        ids = jax.random.randint(jax.random.key(1), (2, 9), 0, vocab_size)
        return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": jnp.ones((2, 8))}
