"""Contract 7: early stopping, averages and warnings are callbacks outside the core, with their own state."""

import json
import math
import pathlib
import re

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.train import (
    BitsPerByte,
    Callback,
    CallbackRequest,
    Checkpointer,
    Evaluation,
    Evaluator,
    JsonlWriter,
    Saving,
)
from axcore.train.callbacks.writers import read_jsonl
from axcore_callbacks.early_stopping import EarlyStopping
from axcore_callbacks.ema import EMA

pytestmark = pytest.mark.long

LOSSES = [3.0, 2.0, 2.5, 1.5, 1.6, 1.7, 1.8, 1.0, 0.9, 0.8, 0.7, 0.6]


class Scripted(Evaluator):
    """Reports a loss that is known in advance."""

    class Config(Evaluator.Config):
        losses: tuple[float, ...] = tuple(LOSSES)

    def __call__(self, model):
        return {"loss": self.config.losses[model.step - 1]}


class Note(Callback):
    """Appends every event to `Note.events`."""

    class Config(Callback.Config):
        """No fields of its own."""

    events = []

    def start(self, run):
        self.events.append(("start", run.step, run.resumed))

    def step(self, info):
        self.events.append(("step", info.step))

    def evaluation(self, step, metrics):
        self.events.append(("evaluation", step))

    def checkpoint(self, step):
        self.events.append(("checkpoint", step))

    def failure(self, error):
        self.events.append(("failure", type(error).__name__))

    def end(self, run):
        self.events.append(("end", run.summary["steps"]))
        return {"noted": len(self.events)}

    def close(self):
        self.events.append(("close",))


class Broken(Callback):
    """Raises in one event."""

    class Config(Callback.Config):
        event: str = "step"
        order: int = -1

    def step(self, info):
        if self.config.event == "step" and info.step == 3:
            raise RuntimeError("out of ideas")

    def state(self):
        return {1, 2} if self.config.event == "state" else {}


class Ask(Callback):
    """Makes requests at given steps."""

    class Config(Callback.Config):
        evaluate: int = 0
        save: int = 0
        stop: int = 0

    def due(self, step):
        cfg = self.config
        return CallbackRequest(
            evaluate=step == cfg.evaluate, save=step == cfg.save, stop=step == cfg.stop, reason="asked"
        )


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(Note, "events", [])
    return Note.events


def steps_of(folder):
    with Checkpointer.Config().build(folder / "checkpoints") as checkpointer:
        return checkpointer.steps()


def state_of(cfg, folder, step=None):
    with cfg.checkpointer.build(folder / "checkpoints") as checkpointer:
        return checkpointer.restore(cfg.build().program().state, step).state


def stopping(tiny, steps, patience=3):
    evaluation = Evaluation.Config(every_steps=1, evaluators={"validation": Scripted.Config()})
    return tiny.set(
        steps=steps,
        callbacks={"evaluation": evaluation, "early_stopping": EarlyStopping.Config(patience=patience)},
    )


def test_early_stopping_ends_the_run_when_the_metric_stagnates(tiny, tmp_path, capsys):
    summary = ax.fit(stopping(tiny, 12), out=tmp_path / "run")
    assert summary["steps"] == 7  # 1.5 at step 4, then three evaluations without improvement
    assert steps_of(tmp_path / "run") == [7]
    assert "callbacks.early_stopping stops the run: validation/loss has not improved in 3 evaluations" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "interrupted", [pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 5, 6]
)
def test_early_stopping_of_a_resumed_run_stops_at_the_same_step(tiny, tmp_path, interrupted):
    ax.fit(stopping(tiny, interrupted), out=tmp_path / "run")
    summary = ax.fit(stopping(tiny, 12), out=tmp_path / "run", resume=True)
    assert summary["steps"] == 7


def test_ema_follows_the_parameters_and_is_in_the_checkpoint(tiny, tmp_path):
    callbacks = {"saving": Saving.Config(every_steps=1), "ema": EMA.Config(decay=0.9, warmup=False)}
    cfg = tiny.set(steps=4, callbacks=callbacks, checkpointer=tiny.checkpointer.set(keep=10))
    ax.fit(cfg.set(steps=2), out=tmp_path / "run")
    ax.fit(cfg, out=tmp_path / "run", resume=True)
    program = cfg.build().program()
    first = program.init(np.uint32(cfg.seed)).params
    expected = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), first)
    for step in range(1, 5):
        state = state_of(cfg, tmp_path / "run", step)
        expected = jax.tree.map(
            lambda mean, leaf: 0.9 * mean + 0.1 * np.asarray(leaf, np.float64), expected, state.params
        )
        jax.tree.map(
            lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8),
            state.callbacks["ema"]["params"],
            expected,
        )
    moved = jax.tree.map(lambda mean, leaf: float(np.abs(mean - leaf).max()), expected, state.params)
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
def test_an_evaluator_can_use_the_average(tiny, tmp_path):
    evaluators = {"validation": BitsPerByte.Config(), "ema": BitsPerByte.Config(weights="ema")}
    callbacks = {"evaluation": Evaluation.Config(evaluators=evaluators), "ema": EMA.Config(decay=0.0, warmup=False)}
    summary = ax.fit(tiny.set(steps=3, callbacks=callbacks), out=tmp_path / "now")
    # With decay=0 the average equals the parameters.
    assert summary["ema/bits_per_byte"] == summary["validation/bits_per_byte"]
    slow = callbacks | {"ema": EMA.Config(decay=0.999, warmup=False)}
    slow = ax.fit(tiny.set(steps=3, callbacks=slow), out=tmp_path / "slow")
    assert slow["validation/bits_per_byte"] == summary["validation/bits_per_byte"]
    assert slow["ema/bits_per_byte"] > slow["validation/bits_per_byte"] + 0.1
    wrong = {"evaluation": Evaluation.Config(evaluators={"ema": BitsPerByte.Config(weights="emma")})}
    with pytest.raises(ax.ConfigError, match=r"callbacks\.evaluation: weights='emma' is not a callback that keeps"):
        ax.fit(tiny.set(steps=3, callbacks=wrong), out=tmp_path / "wrong")


@pytest.mark.slow
def test_callbacks_may_be_added_and_removed_on_resume(tiny, tmp_path, capsys):
    cfg, ema = tiny.set(steps=2, callbacks={}), {"ema": EMA.Config()}
    ax.fit(cfg, out=tmp_path / "run")
    ax.fit(cfg.set(steps=3, callbacks=ema), out=tmp_path / "run", resume=True)
    assert "callbacks.ema: starts from the restored parameters" in capsys.readouterr().err
    stop = {"early_stopping": EarlyStopping.Config(), "evaluation": stopping(tiny, 1).callbacks["evaluation"]}
    ax.fit(cfg.set(steps=4, callbacks=stop), out=tmp_path / "run", resume=True)
    assert "callbacks.ema: the arrays in the checkpoint do not fit this run" in capsys.readouterr().err
    ax.fit(cfg.set(steps=5), out=tmp_path / "run", resume=True)
    assert "keeping the saved state of 'early_stopping', which is not in this config" in capsys.readouterr().err
    with cfg.checkpointer.build(tmp_path / "run" / "checkpoints") as checkpointer:
        assert checkpointer.meta()["callbacks"]["early_stopping"] == {"best": 1.5, "waited": 0}


def test_events_come_in_order_and_once(tiny, tmp_path, events):
    evaluation = Evaluation.Config(every_steps=2, evaluators={"validation": Scripted.Config()})
    cfg = tiny.set(
        steps=4, callbacks={"evaluation": evaluation, "saving": Saving.Config(every_steps=2), "note": Note.Config()}
    )
    summary = ax.fit(cfg, out=tmp_path / "run")
    assert events == [
        ("start", 0, False),
        *[("step", 1), ("step", 2), ("evaluation", 2), ("checkpoint", 2)],
        *[("step", 3), ("step", 4), ("evaluation", 4), ("checkpoint", 4)],
        *[("end", 4), ("close",)],
    ]
    assert summary["noted"] == 10
    events.clear()
    ax.fit(cfg.set(steps=5), out=tmp_path / "run", resume=True)
    assert events[0] == ("start", 4, True) and events[1] == ("step", 5)


def test_requests_evaluate_then_save_then_stop_after_the_same_step(tiny, tmp_path, events):
    evaluation = Evaluation.Config(evaluators={"validation": Scripted.Config()})
    asked = Ask.Config(evaluate=2, save=2, stop=3)
    cfg = tiny.set(steps=9, callbacks={"evaluation": evaluation, "ask": asked, "note": Note.Config()})
    assert ax.fit(cfg, out=tmp_path / "run")["steps"] == 3
    assert events[1:] == [
        *[("step", 1), ("step", 2), ("evaluation", 2), ("checkpoint", 2)],
        *[("step", 3), ("evaluation", 3), ("checkpoint", 3), ("end", 3), ("close",)],
    ]


def test_a_failing_callback_is_named_and_the_state_is_saved(tiny, tmp_path, events):
    cfg = tiny.set(steps=9, callbacks={"broken": Broken.Config(), "note": Note.Config()})
    line = next(
        n for n, text in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1) if "out of ideas" in text
    )
    with pytest.raises(ax.AxcoreError, match=re.escape("callbacks.broken")) as error:
        ax.fit(cfg, out=tmp_path / "run")
    assert f"{__file__}:{line}: RuntimeError: out of ideas" in str(error.value)
    saved = steps_of(tmp_path / "run")
    assert saved in ([3], [4])  # metrics are reported one step late
    assert ("step", 3) in events and events[-1] == ("close",)
    without = cfg.set(callbacks={"note": Note.Config()})
    assert ax.fit(without, out=tmp_path / "run", resume=True)["steps"] == 9


def test_a_callback_with_on_error_disable_is_disabled_with_a_message(tiny, tmp_path, events, capsys):
    callbacks = {"broken": Broken.Config(on_error="disable"), "note": Note.Config()}
    assert ax.fit(tiny.set(steps=5, callbacks=callbacks), out=tmp_path / "run")["steps"] == 5
    told = capsys.readouterr().err
    assert "callbacks.broken failed" in told and "callbacks.broken is disabled for the rest of this run" in told
    assert [event for event in events if event[0] == "step"] == [("step", number) for number in range(1, 6)]


def test_without_an_evaluator_there_is_no_bits_per_byte(tiny, tmp_path):
    callbacks = {"metrics": JsonlWriter.Config(), "evaluation": Evaluation.Config(evaluators={})}
    summary = ax.fit(tiny.set(steps=1, callbacks=callbacks), out=tmp_path / "run")
    assert not [name for name in summary if "bits_per_byte" in name]
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 1 and math.isfinite(lines[0]["train/loss"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_offers_attach_by_name():
    cfg = ax.pipe(ax.recipe("quickstart"), ax.use("ema", decay=0.5), ax.use("early-stopping", patience=7))
    assert cfg.callbacks["ema"] == EMA.Config(decay=0.5)
    assert cfg.callbacks["early-stopping"] == EarlyStopping.Config(patience=7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"patience": 0}, "patience"), ({"mode": "least"}, "mode"), ({"min_delta": -1.0}, "min_delta")],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_invalid_field_raises_and_is_named(tiny, tmp_path, fields, message):
    with pytest.raises(ax.ConfigError, match=message):
        ax.fit(tiny.set(callbacks={"early_stopping": EarlyStopping.Config(**fields)}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
