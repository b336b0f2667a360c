"""axcore-muon passes `OfferSuite`, and `use` puts Muon into a learner."""

import numpy as np
import optax
import pytest

import axcore as ax
from axcore.plugin import Feature, OptimizerOffer, use_text
from axcore.testing.offer import OfferSuite
from axcore.train import AdamW, Learner
from axcore_muon.optimizer import Muon


class TestOptimizer(OfferSuite):
    kind = OptimizerOffer
    name = "muon"

    def config(self):
        return Learner.Config(optimizer=Muon.Config(dtype="float32", others=AdamW.Config(b2=0.99)))


class TestFeature(OfferSuite):
    kind = Feature
    name = "muon"

    def config(self):
        return ax.use("muon", rms=None)(Learner.Config())


def test_previous_optimizer_keeps_the_other_parameters():
    before = Learner.Config(optimizer=AdamW.Config(b2=0.99))
    after = ax.use("muon", momentum=0.9)(before)
    assert after == before.set(optimizer=Muon.Config(momentum=0.9, others=AdamW.Config(b2=0.99)))


def test_case_a_call_of_optax_keeps_the_other_parameters():
    call = ax.call(optax.scale_by_adam, b2=0.9)
    learner = ax.use("muon")(Learner.Config(optimizer=call))
    assert learner.optimizer == Muon.Config(others=call)
    grads = {"bias": np.linspace(-1.0, 2.0, 4, dtype=np.float32)}
    found, wanted = learner.optimizer.build().transformation({"bias": ("mlp",)}), optax.scale_by_adam(b2=0.9)
    found, wanted = (each.update(grads, each.init(grads), grads)[0] for each in (found, wanted))
    np.testing.assert_allclose(found["bias"], wanted["bias"], rtol=1e-6)
    refused = Muon.Config(others=ax.call(optax.adamw, learning_rate=1e-3)).build()
    with pytest.raises(ax.ConfigError, match="adamw applies a learning rate, but the learner applies its schedule"):
        refused.transformation({"bias": ("mlp",)})


def test_options_from_text():
    after = use_text("muon:rms=None,dtype=float32,steps=3,coefficients=(2,-1.5,0.5)")(Learner.Config())
    assert after.optimizer == Muon.Config(rms=None, dtype="float32", steps=3, coefficients=(2, -1.5, 0.5))
    after = ax.override(after, ["optimizer.dtype=float16", "optimizer.others.b1=0.8"])
    assert after.optimizer.dtype == "float16" and after.optimizer.others.b1 == 0.8


def test_a_typo_is_named():
    with pytest.raises(ax.ConfigError, match=r"no field 'momentun'.*momentum"):
        ax.use("muon", momentun=0.9)(Learner.Config())


def test_second_use_is_rejected():
    with pytest.raises(ax.ConfigError, match="already Muon"):
        ax.pipe(Learner.Config(), ax.use("muon"), ax.use("muon"))


def test_only_learners_are_accepted():
    with pytest.raises(ax.ConfigError, match="at the root: Muon requires a learner"):
        ax.use("muon", where=lambda path, node: True)(AdamW.Config())
