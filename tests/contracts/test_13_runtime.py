"""Contract 13: several processes are one run, they end together, and no signal is lost."""

import dataclasses
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from axcore.train.callbacks.writers import read_jsonl

from ..conftest import TINY_PLUGIN

pytestmark = pytest.mark.long

ENDLESS = 1_000_000
CODES = {signal.SIGINT: {130, -signal.SIGINT}, signal.SIGTERM: {75, 143, -signal.SIGTERM}}
"""Documented exit codes. Negative ones occur only before the command is loaded, when the signal kills Python."""


@dataclasses.dataclass
class Command:
    """A process of `axcore ARGV...`, started as a user starts it."""

    argv: tuple[object, ...]
    folder: pathlib.Path

    def __post_init__(self):
        path = os.pathsep.join([str(TINY_PLUGIN), *filter(None, sys.path)])
        self.err = self.folder / "stderr"
        with self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "axcore", *map(str, self.argv)],
                env=os.environ | {"PYTHONPATH": path},
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
            )

    def when(self, condition, seconds=240):
        """Waits until `condition()` holds, or the process has ended."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and not condition():
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.002)

    def compiles(self):
        return "compiling" in self.err.read_text()

    def end(self, number=None, seconds=240):
        """Sends the signal, if any, and waits. Returns (exit code, stderr)."""
        try:
            if number is not None:
                self.process.send_signal(number)
            return self.process.wait(timeout=seconds), self.err.read_text()
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def train(corpus, tmp_path):
    """Starts `axcore train tiny` into `run`, alone or in several processes."""

    def start(*flags, steps=ENDLESS, processes=1, out="run"):
        command = ["train", "tiny", "--out", tmp_path / out, "--steps", steps]
        for assignment in (
            f"input.source.folder={corpus}",
            "callbacks.saving.every_steps=7",
            "callbacks.evaluation.every_steps=5",
        ):
            command += ["--set", assignment]
        if processes > 1:
            command += ["--set", 'mesh.shape={"data": 1, "fsdp": -1}']
            command = ["launch", "--processes", processes, "--timeout", 120, "--", *command]
        return Command((*command, *flags), tmp_path)

    return start


def losses(folder):
    """{step: training loss}. The last loss counts if a step was repeated."""
    path = folder / "metrics.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def saved(folder):
    found = (folder / "checkpoints").iterdir() if (folder / "checkpoints").exists() else ()
    return max((int(each.name) for each in found if each.name.isdecimal()), default=0)


def interrupt(train, folder, moments, rng):
    """Interrupts a run at each of the moments, resumes it each time, and finally trains a few more steps."""
    before = 0
    for moment in moments:
        kind = rng.choice([signal.SIGINT, signal.SIGTERM])
        started = (folder / "config.txt").exists()
        command = train(*(["--resume"] if started else []))
        if moment == "start":
            time.sleep(rng.uniform(0, 0.3))
        elif moment == "compilation":
            command.when(command.compiles)
            time.sleep(rng.uniform(0, 1))
        else:
            step = before + rng.randint(1, 15)
            command.when(lambda step=step: len(losses(folder)) >= step)
            time.sleep(rng.uniform(0, 0.02))
        code, err = command.end(kind)
        assert code in CODES[kind], (moment, kind, code, err)
        steps = max(losses(folder), default=0)
        if found := re.search(r"saved after step (\d+)", err):
            assert int(found[1]) == steps == saved(folder), (moment, err)
        else:
            assert steps == before, (moment, err)  # it was stopped before its first step
        before = steps
    code, err = train("--resume", steps=before + 3).end()
    assert code == 0, err
    assert sorted(losses(folder)) == list(range(1, before + 4))


def test_case_a_run_resumes_after_signals_at_three_moments(train, tmp_path):
    interrupt(train, tmp_path / "run", ["start", "compilation", "steps"], random.Random(0))


@pytest.mark.slow
def test_a_run_resumes_after_signals_at_thirty_random_moments(train, tmp_path):
    seed = random.randrange(2**32)
    print("seed of the signals:", seed)
    moments = ["compilation", "steps", *["start"] * 6, *["compilation"] * 6, *["steps"] * 16]
    interrupt(train, tmp_path / "run", moments, random.Random(seed))


def test_two_processes_train_stop_and_resume_like_one(train, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    code, err = train(steps=12, out="one").end()
    assert code == 0, err

    command = train(processes=2, out="two")
    command.when(lambda: len(losses(two)) >= 3)
    code, err = command.end(signal.SIGTERM)
    assert code == 75, err
    steps = max(losses(two))
    assert re.search(rf"^axcore: process \d of 2 failed: SIGTERM: .* saved after step {steps}\.", err, re.M), err
    assert saved(two) == steps
    assert {line[:3] for line in err.splitlines() if line.startswith("[")} == {"[0]", "[1]"}

    code, err = train("--resume", steps=max(steps, 12), processes=2, out="two").end()
    assert code == 0, err
    expected, found = losses(one), losses(two)
    assert sorted(found) == list(range(1, max(steps, 12) + 1))
    np.testing.assert_allclose([found[step] for step in expected], list(expected.values()), rtol=1e-5)


@pytest.mark.slow
def test_case_a_file_error_of_process_0_ends_both_processes(train, tmp_path):
    (tmp_path / "run").touch()
    code, err = train(processes=2, steps=5).end()
    assert code == 2, err
    assert f"axcore: process 0 of 2 failed: the run folder {tmp_path / 'run'} is a file" in err

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").symlink_to("/proc/nothing/here")
    code, err = train(processes=2, steps=20, out="other").end()
    assert code == 2, err
    assert re.search(r"^axcore: process 0 of 2 failed: .*checkpoints", err, re.M), err
    assert 2 <= max(losses(tmp_path / "other")) < 20
