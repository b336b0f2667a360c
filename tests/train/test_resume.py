"""A run that is killed and resumed repeatedly ends like an uninterrupted run."""

import json
import os
import random
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from axcore.train import Checkpointer
from axcore.train.callbacks.writers import read_jsonl

pytestmark = pytest.mark.long

STEPS = 80

SLOW = """
import time

import axcore as ax
from axcore.train import Checkpointer, Evaluation, WarmupStableDecay
from axcore.train.run import budget
from axcore_tiny import callbacks, recipes

budget.MEASURED_SECONDS = 0.2
if {pace}:  # for the budget every step lasts that many seconds, however fast the machine is

    class Clock:
        now = time.monotonic()

        def monotonic(self):
            self.now += {pace}
            return self.now

    budget.time = Clock()
recipes.edit = lambda cfg: ax.pipe(
    cfg.set(
        steps={steps},
        minutes={minutes},
        callbacks=cfg.callbacks | {{"evaluation": Evaluation.Config(every_steps=25), "pace": callbacks.Pace.Config()}},
    ),
    ax.use("rope"),
)
"""


@pytest.fixture(scope="module")
def train(processes, corpus):
    """Starts the slow recipe: `train(folder, "--resume")`."""

    def start(folder, *flags, minutes=None, pace=None):
        prepare = SLOW.format(steps=None if minutes else STEPS, minutes=minutes, pace=pace)
        arguments = ("--set", f"input.source.folder={corpus}", "--out", folder, *flags)
        return processes.start("train", "tiny", *arguments, prepare=prepare)

    return start


def lines_of(folder):
    """The number of lines of metrics so far."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def losses(folder):
    """(step, loss) of each training line, in the order of the file."""
    return [(r["step"], r["train/loss"]) for r in read_jsonl(folder / "metrics.jsonl") if "train/loss" in r]


def evaluations(folder):
    return [(r["step"], r["validation/loss"]) for r in read_jsonl(folder / "metrics.jsonl") if "validation/loss" in r]


def bits_of_state(tiny, folder):
    """(step, data, {path: bytes of the array}) of the last checkpoint."""
    program = tiny.build().program()
    with Checkpointer.Config().build(folder / "checkpoints") as checkpointer:
        restored = checkpointer.restore(program.state)
    named = jax.tree.leaves_with_path(restored.state)
    state = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in named}
    return restored.step, restored.data, state


def saving(folder):
    return any((folder / "checkpoints").glob("*.orbax-checkpoint-tmp"))


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = train(folder).wait()
    assert done.code == 0, done.err
    assert [step for step, _ in losses(folder)] == list(range(1, STEPS + 1))
    return folder


def test_a_run_killed_at_any_moment_resumes_bit_for_bit(train, whole, tiny, tmp_path):
    folder = tmp_path / "run"
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    print("seed of the kills:", seed)
    kills = [
        lambda: (folder / "config.txt").exists(),  # before it has compiled anything
        lambda: lines_of(folder) >= rng.randint(1, 9),  # before the first checkpoint
        lambda: saving(folder),  # while saving the first one
        lambda: lines_of(folder) >= before + rng.randint(5, 25),
        lambda: saving(folder) and (folder / "checkpoints" / "20").exists(),  # while saving a later one
        lambda: lines_of(folder) >= before + rng.randint(1, 15),
    ]
    before, killed = 0, 0
    process = train(folder)
    for condition in kills:
        if not process.kill_when(condition):
            break
        killed += 1
        before = lines_of(folder)
        process = train(folder, "--resume")
    done = process.wait()
    assert killed >= 5, done
    assert done.code == 0, done.err
    assert losses(folder) == losses(whole)
    assert evaluations(folder) == evaluations(whole)
    assert bits_of_state(tiny, folder) == bits_of_state(tiny, whole)
    assert not saving(folder)


@pytest.mark.slow
def test_a_run_limited_by_minutes_keeps_its_plan_on_resume(train, tmp_path):
    folder = tmp_path / "run"
    plan = folder / "plan.json"
    assert train(folder, minutes=0.2, pace=0.3).kill_when(lambda: lines_of(folder) >= 13)
    assert not plan.exists()
    assert train(folder, "--resume", minutes=0.2, pace=0.3).kill_when(plan.exists)
    decided, content = plan.stat().st_mtime_ns, json.loads(plan.read_text())
    known = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
    assert known < content["decided_at"]  # the plan is newer than every checkpoint
    done = train(folder, "--resume", minutes=0.2, pace=0.01).wait()  # a new plan would have another number of steps
    assert done.code == 0, done.err
    assert plan.stat().st_mtime_ns == decided and json.loads(plan.read_text()) == content
    total = content["total_steps"]
    assert [step for step, _ in losses(folder)] == list(range(1, total + 1))
    assert json.loads((folder / "summary.json").read_text())["steps"] == total
    for line in read_jsonl(folder / "metrics.jsonl"):
        if "train/loss" in line:
            step = line["step"] - 1
            known = total if step >= content["decided_at"] else 2**31 - 1
            rate = 1e-2 * min(1.0, (step + 1) / 5, (known - step) / (0.3 * known))
            assert line["train/learning_rate"] == pytest.approx(rate, rel=1e-5), line["step"]


@pytest.fixture
def copied(whole, tmp_path):
    """A finished run that a test may change."""
    return shutil.copytree(whole, tmp_path / "run")


def test_a_run_killed_after_its_last_checkpoint_finishes_on_resume(train, whole, copied, tiny):
    (copied / "summary.json").unlink()
    done = train(copied, "--resume").wait()
    assert done.code == 0, done.err
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (copied, whole))
    assert ours["validation/bits_per_byte"] == theirs["validation/bits_per_byte"] and ours["steps"] == theirs["steps"]
    assert losses(copied) == losses(whole) and evaluations(copied) == evaluations(whole)
    assert bits_of_state(tiny, copied) == bits_of_state(tiny, whole)


def test_resuming_with_fewer_steps_trains_none_and_says_so(train, copied):
    done = train(copied, "--resume", "--steps", "5").wait()
    assert (
        done.code == 0
        and f"steps=5 is fewer than the {STEPS} steps already done, so there is nothing to train" in done.err
    )
    assert "None" not in done.out and f"steps                    {STEPS}\n" in done.out


def test_metrics_after_the_checkpoint_are_rewritten(train, whole, copied, tiny):
    shutil.rmtree(copied / "checkpoints" / str(STEPS))
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 81, "train/loss": 1e9}\n{"step": 82, "tra')  # torn by a crash
    assert train(copied, "--resume").wait().code == 0
    assert losses(copied) == losses(whole) and evaluations(copied) == evaluations(whole)
    assert bits_of_state(tiny, copied) == bits_of_state(tiny, whole)


def test_resume_rejects_another_config_and_shows_the_difference(axcore, whole, snapshot, corpus):
    before = snapshot(whole)
    flags = ("--set", f"input.source.folder={corpus}", "--set", "model.dim=32", "--seed", "3", "--resume")
    message = axcore("train", "tiny", *flags, "--out", whole).message
    assert f"the run in {whole} cannot be resumed with this config" in message
    assert "~ model.dim: 16 -> 32" in message and "~ seed: 0 -> 3" in message
    assert "callbacks" not in message
    assert "input.source.folder" not in message
    assert snapshot(whole) == before


def test_a_damaged_checkpoint_is_named_and_nothing_is_changed(train, copied, snapshot):
    for path in (copied / "checkpoints" / str(STEPS) / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    before = snapshot(copied)
    message = train(copied, "--resume").wait().message
    assert f"checkpoints/{STEPS} is damaged" in message
    after = snapshot(copied)
    assert {name: file[1] for name, file in after.items() if name != ".lock"} == {
        name: file[1] for name, file in before.items() if name != ".lock"
    }


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_damaged_config_of_the_earlier_run_is_named(axcore, tmp_path, corpus, content):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    if content is not None:
        (run / "config.txt").write_bytes(content)
    message = axcore("train", "tiny", "--set", f"input.source.folder={corpus}", "--out", run, "--resume").message
    assert f"cannot read the config of the earlier run in {run}/config.txt: " in message and "omit --resume" in message


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "other files"])
def test_resume_without_an_earlier_run_raises(axcore, tmp_path, corpus, there):
    folder = tmp_path / "run"
    if there != "nothing":
        folder.mkdir()
    if there == "other files":
        (folder / "notes.txt").write_text("mine")
    done = axcore("train", "tiny", "--set", f"input.source.folder={corpus}", "--out", folder, "--resume")
    assert f"there is no run to resume in {folder}" in done.message
    assert folder.exists() == (there != "nothing")
    assert not folder.exists() or [p.name for p in folder.iterdir()] == ["notes.txt"] * (there == "other files")


def test_two_processes_cannot_train_in_one_folder(train, axcore, corpus, tmp_path):
    folder = tmp_path / "run"
    first = train(folder)
    while lines_of(folder) < 12:
        assert first.poll() is None
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGSTOP)  # suspended but alive
    try:
        arguments = ("train", "tiny", "--set", f"input.source.folder={corpus}", "--out", folder)
        assert f"is in use by process {first.pid} on " in axcore(*arguments).message
        assert f"is in use by process {first.pid} on " in train(folder, "--resume").wait().message
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    finally:
        os.kill(first.pid, signal.SIGCONT)
        done = first.wait()
    assert done.code == 0 and [step for step, _ in losses(folder)] == list(range(1, STEPS + 1))
