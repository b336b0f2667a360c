"""What callbacks and evaluators return is validated, and the message names the callback and the value."""

import json
import re
import types

import numpy as np
import pytest

from axcore.train import Callback, Evaluation, Evaluator
from axcore.train.callbacks.base import FinishedRun
from axcore.train.callbacks.group import Callbacks
from axcore.train.files import write_json


class Returns(Callback):
    """Returns a value from one method."""

    class Config(Callback.Config):
        method: str
        value: str

    def __init__(self, cfg):
        super().__init__(cfg)
        setattr(self, cfg.method, lambda *_: VALUES[cfg.value])


class Constant(Evaluator):
    """Returns a value."""

    class Config(Evaluator.Config):
        value: str

    def __call__(self, model):
        return VALUES[self.config.value]


VALUES = {
    "text": "hello",
    "none": None,
    "set": {"x": {1}},
    "words": {"x": "1.5"},
    "array": {"x": np.ones(3)},
    "numbered": {1: 2.0},
    "steps": {"steps": 99},
    "scalar": {"x": np.float32(2)},
    "nan": {"x": float("nan")},
}


def outcome(callbacks, method):
    """(what the group of callbacks returns, its failure)."""
    group = Callbacks(callbacks)
    finished = FinishedRun(None, None, None, None, {"steps": 3})
    calls = {"step": group.step, "evaluate": group.evaluate, "end": group.end, "state": lambda _: group.states()}
    found = calls[method](finished if method == "end" else types.SimpleNamespace())
    return found, str(group.failure)


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("step", "text", r"callbacks\.bad: step must return a CallbackRequest or None, got 'hello'"),
        ("evaluate", "none", "evaluate must return a mapping from metric names to numbers, got None"),
        ("evaluate", "words", r"evaluate must return numbers, got x='1\.5'"),
        ("evaluate", "array", r"evaluate must return numbers, got x=array\(\[1"),
        ("end", "none", "end must return a mapping from names to JSON values, got None"),
        ("end", "set", r"end must return values that JSON can hold, got x=\{1\}"),
        ("end", "steps", "end returns 'steps', which already has a value"),
        ("state", "numbered", "state must return a mapping from names to JSON values"),
        ("state", "scalar", "state must return values that JSON can hold, got x=.*float"),
    ],
)
def test_an_invalid_return_value_is_named_with_its_callback(method, value, message):
    assert re.search(message, outcome({"bad": Returns.Config(method=method, value=value)}, method)[1])


def test_two_callbacks_cannot_report_one_metric():
    twice = {name: Returns.Config(method="evaluate", value="scalar") for name in "ab"}
    assert "callbacks.b: the metric 'x' is already reported by another callback" in outcome(twice, "evaluate")[1]


def test_an_evaluator_is_named_and_a_scalar_becomes_a_number():
    evaluation = Evaluation.Config(evaluators={"good": Constant.Config(value="scalar")})
    assert outcome({"evaluation": evaluation}, "evaluate")[0] == {"good/x": 2.0}
    evaluation = Evaluation.Config(evaluators={"mine": Constant.Config(value="text")})
    message = "callbacks.evaluation: evaluators.mine must return a mapping from metric names to numbers, got 'hello'"
    assert message in outcome({"evaluation": evaluation}, "evaluate")[1]


def test_a_metric_that_is_not_finite_reaches_the_summary(tmp_path):
    found, failure = outcome({"bad": Returns.Config(method="end", value="nan")}, "end")
    write_json(tmp_path / "summary.json", found)
    assert failure == "None" and json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3, "x": "NaN"}
