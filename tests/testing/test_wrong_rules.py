"""`ParallelismSuite` fails for mesh rules that are wrong in one way, and passes for a correct one.

The rules only set configs of the core, because the process with eight devices cannot import this module.
"""

import itertools

import pytest

import axcore as ax
from axcore.nn import FeedForward
from axcore.parallel import Mesh
from axcore.plugin import MeshRule
from axcore.testing import ParallelismSuite

from .wrong import instance

NUMBERS = itertools.count(2)
RULES = {"batch": ("data", "fsdp"), "embed": "fsdp"}


def mesh(rules=RULES, **shape):
    return lambda cfg: cfg.set(mesh=Mesh(shape=shape or {"data": 2, "fsdp": 4}, rules=rules))


right = mesh()


def also(**fields):
    """The right mesh, and other fields of the trainer."""
    return lambda cfg: right(cfg).set(**fields)


def suite(modify, **attributes):
    attributes = {"name": "cpu", "remat": False, "packed": False, "tied": False, **attributes}
    return instance(ParallelismSuite, modify=lambda self, cfg: modify(cfg), **attributes)


RIGHT = suite(right)


class OtherPattern(ParallelismSuite):
    __test__ = False
    name = "cpu"

    def found(self):
        plugin, _ = super().found()
        return plugin, MeshRule("gpu", "axcore.parallel:Mesh", "A rule for GPUs.", "gpu-*")


CHECKS = {
    "batch": "test_the_batch_is_sharded",
    "copy": "test_modify_is_deterministic_and_returns_a_copy",
    "gradients": "test_gradients_equal_one_device",
    "layout": "test_modify_changes_only_the_layout",
    "loss": "test_loss_and_metrics_equal_one_device",
    "matches": "test_the_rule_matches_the_accelerator",
    "parameters": "test_parameters_and_optimizer_state_are_sharded",
    "updates": "test_updates_equal_one_device",
}
WRONG = {
    "bfloat16": (
        suite(lambda cfg: right(cfg).set(model=cfg.model.set(dtypes=ax.DTypes(compute="bfloat16")))),
        "layout",
    ),
    "bfloat16, computed": (
        suite(lambda cfg: right(cfg).set(model=cfg.model.set(dtypes=ax.DTypes(compute="bfloat16")))),
        "gradients",
    ),
    "dropout": (suite(lambda cfg: right(cfg).set(model=ax.use("dropout", rate=0.1)(cfg.model))), "layout"),
    "narrow": (suite(lambda cfg: right(cfg).set(model=ax.select(cfg.model, FeedForward).set(hidden_dim=16))), "layout"),
    "nothing": (suite(lambda cfg: cfg), "copy"),
    "objective": (suite(lambda cfg: right(cfg).set(objective=cfg.objective.set(z_loss=2e-3))), "layout"),
    "other pattern": (OtherPattern(), "matches"),
    "learning rate": (
        suite(lambda cfg: right(cfg).set(learner=cfg.learner.set(schedule=cfg.learner.schedule.set(peak=2.0)))),
        "layout",
    ),
    "random": (suite(lambda cfg: mesh(data=next(NUMBERS), fsdp=1)(cfg)), "copy"),
    "replicated batch": (suite(mesh({"embed": "fsdp"})), "batch"),
    "replicated parameters": (suite(mesh({"batch": ("data", "fsdp")})), "parameters"),
    "seed": (suite(also(seed=1)), "layout"),
    "sixteen devices": (suite(right, accelerator="cpu-16"), "matches"),
    "steps": (suite(also(steps=2)), "layout"),
    "too many devices": (suite(mesh(data=4, fsdp=4)), "loss"),
    "unknown axis": (suite(mesh({**RULES, "embedding": "fsdp"})), "loss"),
}
COMPILED = ("bfloat16, computed", "replicated batch", "replicated parameters", "too many devices", "unknown axis")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in COMPILED else ()) for name in WRONG]
)
def test_case_a_wrong_mesh_rule_fails(name):
    wrong, check = WRONG[name]
    with pytest.raises(AssertionError):
        getattr(wrong, CHECKS[check])()


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_case_a_correct_mesh_rule_passes(check):
    getattr(RIGHT, CHECKS[check])()
