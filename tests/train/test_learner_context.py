"""An optax transformation of a training step may read the invocation context."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axcore import ConfigError
from axcore.module import current, fold
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.parallel import Mesh
from axcore.train import Learner, Optimizer
from axcore.train.step.program import program

SEEN = []


class Telling(Optimizer):
    """Returns the gradients unchanged. Reports summaries and, if `loss` is set, a loss."""

    class Config(Optimizer.Config):
        loss: bool = False

    def transformation(self, axes):
        def update(updates, state, params=None):
            frame = current()
            SEEN.append((frame.path, frame.training))
            frame.add_summary("largest", jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(updates)]).max())
            frame.add_summary("draw", jax.random.uniform(frame.rng("noise")))
            if self.config.loss:
                frame.add_loss("late", 1.0, 1)
            return updates, state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def step(**options):
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=6))
    model = CausalLM.Config(vocab_size=7, dim=4, decoder=Repeat.Config(num_layers=2, layers=layer))
    learner = Learner.Config(optimizer=Telling.Config(**options), clip_norm=None)
    made = program(model, learner, Mesh(shape={"data": 1, "fsdp": 1}).make(jax.devices()[:1]))
    ids = np.arange(6, dtype=np.int32).reshape(1, 6)
    batch = {"inputs": ids, "targets": (ids + 1) % 7, "weights": np.ones((1, 6), np.float32)}
    return jax.jit(made.train_step)(made.init(jnp.uint32(3)), batch)[1]


def test_the_context_is_the_learners_and_summaries_become_metrics():
    SEEN.clear()
    metrics = step()
    assert SEEN == [("learner", True)]
    assert 0 < metrics["learner.largest"] <= metrics["gradient_norm"]
    key = fold(jax.random.fold_in(jax.random.key(jnp.uint32(3)), 0), "learner")
    np.testing.assert_allclose(metrics["learner.draw"], jax.random.uniform(fold(key, "noise")), rtol=1e-6)


def test_a_loss_of_the_learner_is_rejected():
    with pytest.raises(ConfigError, match=r"learner\.late"):
        step(loss=True)
