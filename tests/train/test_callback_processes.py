"""Callbacks that act differently on two processes neither separate nor block the processes."""

import os
import pathlib
import sys
import time

import pytest

from axcore.runtime.launch import LaunchFailed, launch

from ..conftest import TINY_PLUGIN

pytestmark = pytest.mark.long
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def start(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(TINY_PLUGIN), *filter(None, sys.path)]))

    def run(name):
        command = [sys.executable, "-m", "tests.train.callback_processes", name, str(corpus), str(tmp_path / "run")]
        return launch(command, processes=2, timeout=60)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flush", "saved"])
def test_both_processes_stop_after_the_same_step(start, capfd, name):
    assert start(name) == 0
    out = capfd.readouterr().out
    assert "[0] steps 6" in out and "[1] steps 6" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluator", "disabled"])
def test_an_evaluator_error_on_one_process_ends_both(start, name):
    began = time.monotonic()
    with pytest.raises(LaunchFailed, match=r"process 1 of 2 failed: .*the data of process 1 cannot be read"):
        start(name)
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_case_a_signal_to_one_process_during_evaluation_stops_and_saves_both(start, tmp_path):
    with pytest.raises(LaunchFailed, match=r"SIGTERM: stopped the run .*: saved after step 3\.") as caught:
        start("terminated")
    assert caught.value.exit_code == 75
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]
