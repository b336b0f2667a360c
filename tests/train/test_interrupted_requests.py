"""Requests of callbacks are not lost when a run stops, resumes or is extended."""

import json

import pytest

import axcore as ax
from axcore.runtime import signals
from axcore.train import Callback, Evaluation, Evaluator, JsonlWriter, RunStopped, Saving
from axcore.train.callbacks.writers import read_jsonl
from axcore.train.run import budget
from axcore.train.run.folder import Lock
from axcore_callbacks.early_stopping import EarlyStopping

pytestmark = pytest.mark.long


class Rising(Evaluator):
    """A loss that never improves."""

    class Config(Evaluator.Config):
        """No fields of its own."""

    def __call__(self, model):
        return {"loss": float(model.step)}


class Terminate(Callback):
    """Sends SIGTERM to the run as a step is dispatched or evaluated."""

    class Config(Callback.Config):
        at: int
        during: str

    def due(self, step):
        if (step, self.config.during) == (self.config.at, "step"):
            signals.signal.raise_signal(signals.signal.SIGTERM)

    def evaluate(self, model):
        if (model.step, self.config.during) == (self.config.at, "evaluation"):
            signals.signal.raise_signal(signals.signal.SIGTERM)
            model.check()
        return {}


class Fragile(Callback):
    """Fails at its first step, and counts the calls of `close`."""

    class Config(Callback.Config):
        """No fields of its own."""

    closed = 0

    def step(self, info):
        raise ValueError("broken")

    def close(self):
        type(self).closed += 1


class Unreadable(Callback):
    class Config(Callback.Config):
        """No fields of its own."""

    def state(self):
        raise ValueError("no state")


def evaluated(folder):
    return [row["step"] for row in read_jsonl(folder / "metrics.jsonl") if "validation/loss" in row]


def rising(tiny, steps, **callbacks):
    evaluation = Evaluation.Config(every_steps=2, evaluators={"validation": Rising.Config()})
    return tiny.set(steps=steps, callbacks={"evaluation": evaluation, "metrics": JsonlWriter.Config(), **callbacks})


@pytest.mark.parametrize("during", [pytest.param("step", marks=pytest.mark.slow), "evaluation"])
def test_case_an_evaluation_interrupted_by_a_signal_runs_on_resume(tiny, tmp_path, during):
    folder = tmp_path / "run"
    with pytest.raises(RunStopped):
        ax.fit(rising(tiny, 6, kill=Terminate.Config(at=4, during=during, order=-1)), folder)
    assert evaluated(folder) == [2]
    ax.fit(rising(tiny, 6), folder, resume=True)
    assert evaluated(folder) == [2, 4, 6]


def test_an_early_stopped_run_continues_only_with_more_patience(tiny, tmp_path):
    folder = tmp_path / "run"
    patience = lambda steps: rising(tiny, 20, stop=EarlyStopping.Config(patience=steps))  # noqa: E731
    assert ax.fit(patience(2), folder)["steps"] == 6
    assert ax.fit(patience(2), folder, resume=True)["steps"] == 6
    assert ax.fit(patience(4), folder, resume=True)["steps"] == 10


@pytest.mark.slow
def test_a_finished_run_continues_if_given_more_minutes(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "MEASURED_SECONDS", 0.2)
    cfg = tiny.set(steps=None, minutes=0.05, callbacks={"saving": Saving.Config()})
    first = ax.fit(cfg, tmp_path / "run")
    again = ax.fit(cfg, tmp_path / "run", resume=True)
    assert again["steps"] == first["steps"]
    with Lock(tmp_path / "run"), pytest.raises(ax.AxcoreError, match="in use"):
        ax.fit(cfg.set(minutes=0.1), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "plan.json").exists()  # a run that cannot lock the folder must not delete the plan
    second = ax.fit(cfg.set(minutes=0.1), tmp_path / "run", resume=True)
    assert second["steps"] > first["steps"]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["total_steps"] == second["steps"] and plan["decided_at"] > first["steps"]


def test_a_disabled_callback_is_closed_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Fragile, "closed", 0)
    ax.fit(tiny.set(steps=2, callbacks={"fragile": Fragile.Config(on_error="disable")}), tmp_path / "run")
    assert Fragile.closed == 1


def test_an_error_in_state_names_the_callback_on_resume(tiny, tmp_path):
    ax.fit(tiny.set(steps=1, callbacks={}), tmp_path / "run")
    with pytest.raises(ax.AxcoreError, match=r"callbacks\.unreadable failed at .*ValueError: no state"):
        ax.fit(tiny.set(steps=2, callbacks={"unreadable": Unreadable.Config()}), tmp_path / "run", resume=True)
