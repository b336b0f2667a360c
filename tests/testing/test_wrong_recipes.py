"""`RecipeSuite` fails for recipes that are wrong in one way, and passes for a correct one."""

import random

import pytest

import axcore as ax
from axcore.nn import Attention, FeedForward, Full, Normal, RMSNorm
from axcore.testing import RecipeSuite, tiny_model
from axcore.train import Trainer

from .wrong import instance, names


def trainer(model):
    return Trainer.Config(model=model, steps=1)


def node(**fields):
    """A norm whose class exists only in this process, with other fields."""

    class Norm(RMSNorm):
        class Config(RMSNorm.Config):
            setting: object = None

    return Norm.Config(**fields)


def registered():
    @ax.register
    def activation(x):
        return x

    return trainer(ax.select(tiny_model(), FeedForward).set(activation=activation))


def unregistered():
    return trainer(ax.select(tiny_model(), FeedForward).set(activation=lambda x: x))


def attention(**fields):
    return lambda: trainer(ax.select(tiny_model(), Attention).set(**fields))


def suite(make, **attributes):
    return instance(RecipeSuite, config=lambda self: make(), **attributes)


CHECKS = {
    "causality": "test_later_tokens_do_not_change_logits",
    "deterministic": "test_recipe_is_deterministic",
    "found": "test_plugin_is_loaded",
    "process": "test_a_new_process_can_read_the_config_of_a_run",
    "survives": "test_config_survives_text_json_and_pickle",
    "traced": "test_the_full_model_can_be_traced",
    "trained": "test_a_small_model_can_be_trained",
}
WRONG = {
    "a model": (suite(tiny_model), "deterministic", "must return a Trainer.Config, got"),
    "full mask": (suite(attention(mask=Full())), "causality", "changes the logits before them"),
    "heads": (suite(attention(num_heads=3, num_kv_heads=3)), "traced", "num_heads=3"),
    "large": (suite(lambda: trainer(tiny_model()), largest=100), "trained", "at most 100 are allowed"),
    "local class": (suite(lambda: trainer(tiny_model().set(norm=node()))), "process", "is not a config type"),
    "local function": (suite(registered), "process", "registered"),
    "no number of layers": (
        suite(lambda: trainer(ax.select(tiny_model(), "decoder").set(num_layers=ax.REQUIRED))),
        "traced",
        "num_layers",
    ),
    "object": (suite(lambda: trainer(tiny_model().set(norm=node(setting=object())))), "survives", "has no codec"),
    "overflow": (
        suite(lambda: trainer(ax.select(tiny_model(), "head").set(init=Normal(stddev=1e30)))),
        "trained",
        "the loss is|NaN or infinities",
    ),
    "random": (suite(lambda: trainer(tiny_model()).set(seed=random.randrange(2**31))), "deterministic", "seed"),
    "unknown": (suite(lambda: None, name="no-such-recipe"), "found", "no installed plugin offers the recipe"),
    "unregistered function": (suite(unregistered), "process", "not registered"),
}
LONG = ("heads", "large", "local function", "unregistered function", "random")


@pytest.mark.parametrize("name", names(WRONG, LONG))
def test_case_a_wrong_recipe_fails(name):
    wrong, check, message = WRONG[name]
    with pytest.raises(Exception, match=f"(?s){message}"):
        getattr(wrong, CHECKS[check])()


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check != "found"])
def test_case_a_correct_recipe_passes(check):
    getattr(suite(lambda: trainer(tiny_model())), CHECKS[check])()
