"""Models with INT8 whose codes a step or another number format would change are refused before a step."""

import jax
import pytest

import axcore as ax
from axcore.testing import tiny_model
from axcore.train import Learner
from axcore.train.step.program import program


def model(**options):
    return ax.use("int8", where="decoder.**", **options)(tiny_model())


def stored_model(**options):
    return ax.select(model(**options), lambda _, node: ax.config.has_field(node, "stored")).set(stored=True)


def made(cfg, **learner):
    return program(cfg, Learner.Config(**learner), ax.parallel.Mesh().make(jax.devices()[:1]))


def test_stored_weights_cannot_be_trained_unless_they_are_frozen():
    cfg = stored_model(activation_scales=None)
    with pytest.raises(ax.ConfigError, match=r"^model\.decoder\..*\.weight\.codes: int8 parameters.*learner\.rates"):
        made(cfg)
    made(cfg, rates={"**.weight.*": 0.0})


def test_stored_weights_keep_their_number_format():
    with pytest.raises(ax.ConfigError, match=r"numerics is Int8\.Config with stored weights"):
        ax.use("int8", where="decoder.**")(stored_model())
