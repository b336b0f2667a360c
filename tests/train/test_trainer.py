"""The trainer, end to end, on a corpus whose figures are known."""

import collections
import contextlib
import functools
import io
import json
import math
import types
from typing import ClassVar

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.config import AxcoreError
from axcore.nn import FeedForward, use_remat
from axcore.parallel import ByTag
from axcore.train import (
    Callback,
    Evaluation,
    FinishedRun,
    JsonlWriter,
    Saving,
    Schedule,
    TrainingError,
    Writer,
)
from axcore.train.callbacks.writers import read_jsonl
from axcore.train.run.folder import Lock
from axcore.train.step.program import Program

pytestmark = pytest.mark.long

STEPS = 150
COMPILED = "/jax/core/compile/backend_compile_duration"


class Log(Writer):
    """Appends every call to `Log.events`."""

    class Config(Writer.Config):
        """No fields of its own."""

    events: ClassVar[list] = []

    def write(self, step, values):
        self.events.append((step, sorted(values)))

    def rewind(self, step):
        self.events.append(("rewind", step))

    def flush(self):
        self.events.append("flush")

    def close(self):
        self.events.append("close")


class Peek(Callback):
    """Hands the finished run to the test, and adds to the summary."""

    class Config(Callback.Config):
        """No fields of its own."""

    runs: ClassVar[list] = []

    def end(self, run: FinishedRun):
        self.runs.append(run)
        return {"peeked": run.summary["steps"]}


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """One complete run, with everything that it reported."""
    folder = tmp_path_factory.mktemp("trained") / "deep" / "run"
    cfg = tiny.set(
        steps=STEPS,
        callbacks=tiny.callbacks
        | {
            "evaluation": Evaluation.Config(every_steps=50),
            "saving": Saving.Config(every_steps=40),
            "log": Log.Config(),
            "peek": Peek.Config(),
        },
    )
    events, traces = Log.events, collections.Counter()
    step = Program.train_step

    @functools.wraps(step)
    def counted(self, state, batch):
        traces["train_step"] += 1
        return step(self, state, batch)

    def on_event(event, seconds, **details):
        if event == COMPILED:
            events.append(("compiled", details.get("fun_name")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "train_step", counted)
        jax.monitoring.register_event_duration_secs_listener(on_event)
        try:
            summary = ax.fit(cfg, out=folder)
        finally:
            jax.monitoring.unregister_event_duration_listener(on_event)
    metrics = read_jsonl(folder / "metrics.jsonl")
    return types.SimpleNamespace(
        cfg=cfg,
        folder=folder,
        summary=summary,
        run=Peek.runs[-1],
        events=list(events),
        traces=traces,
        train=[line for line in metrics if "train/loss" in line],
        evals=[line for line in metrics if "validation/bits_per_byte" in line],
        metrics=metrics,
    )


def bits_of_unigrams(content):
    counts = np.bincount(np.frombuffer(content, np.uint8)).astype(float)
    shares = counts[counts > 0] / counts.sum()
    return -(shares * np.log2(shares)).sum()


def test_the_model_learns_more_than_byte_frequencies(trained):
    unigrams = bits_of_unigrams(b"".join(trained.run.input.validation_bytes()))
    assert 3 < unigrams < 4  # the corpus has the expected entropy
    last = np.mean([line["train/loss"] for line in trained.train[-20:]]) / math.log(2)
    assert last < unigrams - 1
    assert trained.summary["validation/bits_per_byte"] < unigrams - 1
    assert trained.train[0]["train/loss"] > math.log(256) - 0.5  # the first loss is that of an untrained model


def test_the_summary_describes_the_run(trained):
    summary = trained.summary
    assert summary == json.loads((trained.folder / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["tokens"] == STEPS * 4 * 16
    assert summary["compilations"] == 1
    assert 0 < summary["host_ms_per_step"] < 100
    assert summary["plugins"] == {"rope": f"axcore-rope {ax.__version__}"}
    assert summary["versions"] == {"axcore": ax.__version__, "jax": jax.__version__}
    layer = 2 * 16 + 16 * (16 + 8 + 8) + 16 * 16 + 3 * 16 * 32
    assert summary["parameters"] == 264 * 16 + 2 * layer + 16 + 16 * 264
    assert summary["peeked"] == STEPS


def test_case_the_speed_in_the_summary_excludes_compilation(trained):
    speeds = [line["train/tokens_per_second"] for line in trained.train if "train/tokens_per_second" in line]
    assert trained.summary["tokens_per_second"] == pytest.approx(len(speeds) / sum(1 / speed for speed in speeds))
    assert trained.summary["tokens_per_second"] > trained.summary["tokens"] / trained.summary["train_seconds"]


def separate(texts, separator):
    stream = [token for text in texts for token in (separator, *text)]
    return np.array(stream)


def test_bits_per_byte_equal_a_float64_computation_from_logits(trained, corpus):
    """The reference evaluates the part of each document in each window separately, without packing, in float64."""
    source = trained.run.input.config.source.build()
    texts = [path.read_bytes() for path in sorted(corpus.iterdir()) if source.is_validation(path.name)]
    assert len(texts) > 3
    stream = separate(texts, 256)
    inputs, targets, scored = [], [], []
    for start in range(0, len(stream) - 1, 16):
        window, after = stream[start : start + 16], stream[start + 1 : start + 17]
        parts = np.split(np.arange(len(after)), np.flatnonzero(window[: len(after)] == 256))
        for part in filter(len, parts):
            pad = 16 - len(part)
            inputs.append(np.pad(window[part], (0, pad), constant_values=7))  # later tokens have no effect
            targets.append(np.pad(after[part], (0, pad)))
            scored.append(np.arange(16) < len(part))
    targets, scored = np.array(targets), np.array(scored)
    assert scored.sum() == sum(map(len, texts)) + len(texts) - 1  # every token except the first separator is a target
    logits = np.asarray(jax.jit(lambda ids: trained.run.model(ids))(np.array(inputs, np.int32)), np.float64)
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    nats = log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    bits = nats[scored].sum() / math.log(2) / sum(map(len, texts))
    assert trained.summary["validation/bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_metrics_hold_each_step_once_and_in_order(trained):
    assert [line["step"] for line in trained.train] == list(range(1, STEPS + 1))
    steps = [line["step"] for line in trained.metrics]
    assert steps == sorted(steps)
    times = [line["time"] for line in trained.metrics]
    assert times == sorted(times)


def test_every_step_reports_loss_gradient_norm_rate_and_z_loss(trained):
    expected = {"loss", "gradient_norm", "learning_rate", "z_loss"}
    for line in trained.train:
        assert {f"train/{name}" for name in expected} <= line.keys()
        assert all(math.isfinite(line[f"train/{name}"]) for name in expected)
        assert 0 < line["train/z_loss"] < 1e-3 * 100
        rate = 1e-2 * min(1.0, line["step"] / 5, (STEPS - line["step"] + 1) / (0.3 * STEPS))
        assert line["train/learning_rate"] == pytest.approx(rate, rel=1e-5)
    assert all(line["train/tokens_per_second"] > 0 for line in trained.train[1:40])


def test_the_first_z_loss_follows_from_near_zero_logits(trained):
    # At the start all logits are near 0, so that log Z is near ln 264.
    first = trained.train[0]
    assert first["train/z_loss"] == pytest.approx(1e-3 * first["train/loss"] ** 2, rel=0.3)


def test_evaluations_run_on_schedule_and_once_at_the_end(trained):
    assert [line["step"] for line in trained.evals] == [50, 100, 150]
    bits = [line["validation/bits_per_byte"] for line in trained.evals]
    assert bits == sorted(bits, reverse=True) and bits[-1] == trained.summary["validation/bits_per_byte"]


def test_the_train_step_is_traced_and_compiled_exactly_once(trained):
    assert trained.traces["train_step"] == 1
    compiled = [index for index, event in enumerate(trained.events) if event == ("compiled", "jit(train_step)")]
    first_step = next(index for index, event in enumerate(trained.events) if event[0] == 1)
    assert len(compiled) == 1 and compiled[0] < first_step


def test_nothing_is_compiled_between_later_steps(trained):
    first, last = (next(i for i, event in enumerate(trained.events) if event[0] == step) for step in (2, 39))
    assert not [event for event in trained.events[first:last] if event[0] == "compiled"]


def test_writers_are_flushed_with_every_checkpoint_and_closed(trained):
    events = [event for event in trained.events if event[0] != "compiled"]
    for step in (40, 80, 120):
        index = next(i for i, event in enumerate(events) if event[0] == step)
        assert events[index + 1] == "flush"
    assert events[-1] == "close"


def test_the_run_folder_has_config_checkpoints_and_metadata(trained):
    assert (trained.folder / "config.txt").read_text() == trained.cfg.text()
    assert any((trained.folder / "tensorboard").iterdir())
    with trained.cfg.checkpointer.build(trained.folder / "checkpoints") as checkpointer:
        assert checkpointer.steps() == [80, 120, STEPS]
        meta = checkpointer.meta()
    assert meta["config"] == trained.cfg.text() and meta["plugins"] == trained.summary["plugins"]
    assert 0 < meta["seconds"] <= trained.summary["seconds"]


@pytest.fixture(scope="module")
def thrice(tiny, tmp_path_factory, snapshot):
    """(folder, [results of each run]) of three short runs in the same folder. The last run has another seed."""
    folder = tmp_path_factory.mktemp("thrice") / "run"
    short = tiny.set(steps=3, callbacks={"metrics": JsonlWriter.Config(), "evaluation": Evaluation.Config()})
    runs = []
    for cfg in (short, short, short.set(seed=1)):
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            summary = ax.fit(cfg, out=folder)
        lines = read_jsonl(folder / "metrics.jsonl")
        losses = [line["train/loss"] for line in lines if "train/loss" in line]
        runs.append(
            types.SimpleNamespace(summary=summary, losses=losses, files=snapshot(folder), err=printed.getvalue())
        )
    return folder, runs


@pytest.mark.slow
def test_equal_configs_give_equal_losses_and_another_seed_does_not(trained, thrice):
    _, (first, second, third) = thrice
    assert len(first.losses) == 3 and first.losses == second.losses
    assert not set(first.losses) & set(third.losses)
    assert first.losses[0] == trained.train[0]["train/loss"]


@pytest.mark.slow
def test_each_run_in_one_process_counts_its_own_compilations(thrice):
    assert [run.summary["compilations"] for run in thrice[1]] == [1, 1, 1]


def test_resume_reports_changed_plugin_versions(tiny, tmp_path, capsys, monkeypatch):
    cfg = tiny.set(steps=1, callbacks={})
    ax.fit(cfg, out=tmp_path / "run")
    capsys.readouterr()
    ax.fit(cfg, out=tmp_path / "run", resume=True)
    assert "was written with" not in capsys.readouterr().err
    monkeypatch.setattr("axcore.train.run.session.contributors", lambda _: {"rope": "axcore-rope 9.9"})
    ax.fit(cfg, out=tmp_path / "run", resume=True)
    told = capsys.readouterr().err
    assert "written with axcore-rope 0.1.0" in told and "this run has axcore-rope 9.9" in told


def test_an_earlier_run_is_moved_aside_and_not_lost(thrice, snapshot):
    folder, (first, second, third) = thrice
    without_lock = lambda files: {name: file for name, file in files.items() if name != ".lock"}  # noqa: E731
    for number, run in ((1, first), (2, second)):
        assert without_lock(snapshot(f"{folder}.{number}")) == without_lock(run.files)
    assert f"moved the earlier run in {folder} to {folder}.2" in third.err
    assert "earlier run" not in first.err
    assert "seed: 1\n" in (folder / "config.txt").read_text()
    assert len(read_jsonl(folder / "metrics.jsonl")) == 4  # three steps and the evaluation


class Poison(Schedule):
    """A rate that is NaN at one step."""

    at: int = 0

    def __call__(self, step, total_steps):
        return jax.numpy.where(step == self.at, jax.numpy.nan, 1e-3).astype(jax.numpy.float32)


def poisoned(tiny, *, steps, every_steps):
    """The update of step 15 makes the parameters NaN, so the loss of step 16 is the first that is not finite."""
    callbacks = tiny.callbacks | {"saving": Saving.Config(every_steps=every_steps)}
    return tiny.set(learner=tiny.learner.set(schedule=Poison(at=14)), steps=steps, callbacks=callbacks)


def finite_checkpoints(cfg, folder):
    """The steps of all checkpoints. Asserts that all their parameters are finite."""
    program = cfg.build().program()
    with cfg.checkpointer.build(folder / "checkpoints") as checkpointer:
        for step in checkpointer.steps():
            state = checkpointer.restore(program.state, step).state
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params)), f"checkpoint {step}"
        return checkpointer.steps()


def test_a_nonfinite_loss_stops_the_run_and_keeps_checkpoints(tiny, tmp_path):
    cfg = poisoned(tiny, steps=30, every_steps=4)
    with pytest.raises(TrainingError, match="Earlier checkpoints are unchanged"):
        ax.fit(cfg, out=tmp_path / "run")
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) in (15, 16)
    assert all(math.isfinite(line["train/loss"]) for line in lines[:15])
    assert not (tmp_path / "run" / "summary.json").exists()
    assert finite_checkpoints(cfg, tmp_path / "run") == [4, 8, 12]


@pytest.mark.parametrize("steps", [30, 15], ids=["at a checkpoint", "at the last step"])
def test_nonfinite_parameters_are_never_saved(tiny, tmp_path, steps):
    """The update that makes the parameters NaN belongs to a step with a finite loss and a checkpoint."""
    cfg = poisoned(tiny, steps=steps, every_steps=5)
    with pytest.raises(TrainingError, match="Earlier checkpoints are unchanged"):
        ax.fit(cfg, out=tmp_path / "run")
    assert finite_checkpoints(cfg, tmp_path / "run") == [5, 10]


@pytest.fixture
def untrained(monkeypatch):
    """Runs stop before training."""
    monkeypatch.setattr("axcore.train.run.trainer.Session.run", lambda run, resume: {"resumed": resume})


def test_an_earlier_run_at_a_tilde_path_is_moved_aside(tiny, tmp_path, monkeypatch, untrained):
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):  # a shell does not expand --out=~/run
        ax.fit(tiny, out="~/run")
    assert (tmp_path / "run.1" / "config.txt").exists()
    assert ax.fit(tiny, out="~/run", resume=True) == {"resumed": True}


def test_a_run_folder_in_use_raises(tiny, tmp_path, snapshot, untrained):
    folder = tmp_path / "run"
    ax.fit(tiny, out=folder)
    with Lock(folder):
        before = snapshot(folder)
        for resume in (False, True):
            with pytest.raises(AxcoreError, match="in use by process"):
                ax.fit(tiny, out=folder, resume=resume)
        assert snapshot(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    ax.fit(tiny, out=folder, resume=True)


@pytest.mark.parametrize(
    "broken",
    [
        {"minutes": 1.0},
        {"minutes": None, "steps": None},
    ],
    ids=str,
)
def test_an_invalid_config_raises_before_any_file_changes(tiny, tmp_path, snapshot, broken, untrained):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.txt").write_text("an earlier run")
    before = snapshot(tmp_path)
    with pytest.raises(AxcoreError, match=rf"{next(reversed(broken))}"):
        ax.fit(tiny.set(**broken), out=tmp_path / "run")
    assert snapshot(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_case_a_lambda_in_the_config_raises_before_an_earlier_run_moves(tiny, tmp_path, snapshot, untrained):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.txt").write_text("an earlier run")
    before = snapshot(tmp_path)
    with pytest.raises(AxcoreError, match="lambda"):
        ax.fit(ax.select(tiny, FeedForward).set(activation=lambda x: x), out=tmp_path / "run")
    assert snapshot(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_vocabulary_smaller_than_the_tokenizers_raises(tiny, tmp_path, untrained):
    """jax does not report out-of-bounds reads of the embedding."""
    with pytest.raises(AxcoreError, match="vocab_size"):
        ax.fit(ax.override(tiny, ["model.vocab_size=200"]), out=tmp_path / "run")


def test_a_tag_that_no_value_has_raises_before_the_run_folder_exists(tiny, tmp_path):
    cfg = use_remat(tiny.set(steps=1), ByTag(save=("quarry",)))
    with pytest.raises(ax.ConfigError, match="no value is tagged 'quarry'"):
        ax.fit(cfg, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Failing(Callback):
    class Config(Callback.Config):
        """No fields of its own."""

    def end(self, run):
        raise AxcoreError("the report failed")


def test_a_callback_failure_at_the_end_keeps_the_trained_model(tiny, tmp_path):
    cfg = tiny.set(steps=2, callbacks={"failing": Failing.Config()})
    with pytest.raises(AxcoreError, match="the report failed"):
        ax.fit(cfg, out=tmp_path / "run")
    with cfg.checkpointer.build(tmp_path / "run" / "checkpoints") as checkpointer:
        assert checkpointer.latest() == 2
    assert (tmp_path / "run" / "summary.json").exists()
