"""A process that is killed within a step ends the other one, and the run resumes as if it had not been interrupted."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from axcore.runtime import ExitCode
from axcore.runtime.launch import LaunchFailed, launch

from ..conftest import TINY_PLUGIN
from .two_processes import SAVED, STEPS, losses

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.train.killed_process"]


@pytest.fixture(scope="module")
def train(corpus):
    """Trains with FSDP over two processes. Kills one of them in step `at`."""

    def run(folder, at=0, victim=0):
        return launch([*COMMAND, str(corpus), str(folder), str(at), str(victim)], processes=2, timeout=60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(TINY_PLUGIN), *filter(None, sys.path)]))
        yield run


@pytest.fixture(scope="module")
def unbroken(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert train(folder) == 0
    return losses(folder)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_with_a_process_killed_within_a_step_fails_and_resumes(train, unbroken, tmp_path, victim):
    folder = tmp_path / "run"
    with pytest.raises(LaunchFailed, match=f"process {victim} of 2 failed: it was killed by SIGKILL") as caught:
        train(folder, at=5, victim=victim)
    assert caught.value.exit_code == 137
    assert [path.name for path in (folder / "checkpoints").iterdir() if path.name.isdigit()] == [str(SAVED)]
    assert train(folder) == 0
    assert len(unbroken) == STEPS and losses(folder) == unbroken


@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_process_ends_without_a_launcher(train, corpus, tmp_path, victim):
    """As on a cluster, where no launcher ends the processes of a failed run."""
    timeout = 20
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    run = {"AXCORE_COORDINATOR": coordinator, "AXCORE_PROCESSES": "2", "AXCORE_TIMEOUT": str(timeout)}
    command = [*COMMAND, str(corpus), str(tmp_path / "run"), "5", str(victim)]
    started = [
        subprocess.Popen(command, env=os.environ | run | {"AXCORE_PROCESS_ID": str(index)}, stderr=subprocess.PIPE)
        for index in range(2)
    ]
    try:
        assert started[victim].wait(timeout=120) == -signal.SIGKILL
        began = time.monotonic()
        _, err = started[1 - victim].communicate(timeout=120)
        seconds = time.monotonic() - began
    finally:
        for process in started:
            process.kill()
    assert seconds < timeout
    # jax aborts a process that notices first that the coordination service or a heartbeat is gone.
    messages = {
        ExitCode.PEER_FAILED: "process 0 of 2 lost its connection to another process, which was probably killed",
        -signal.SIGABRT: "another task died; see the other task logs",
    }
    code = started[1 - victim].returncode
    assert code in messages and messages[code] in err.decode(), err.decode()
    assert victim == 1 or code == -signal.SIGABRT  # process 0 hosts the service
