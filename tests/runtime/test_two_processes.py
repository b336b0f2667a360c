"""Two processes synchronize, agree, and end together with the error of the one that failed first."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from axcore.runtime.launch import LaunchFailed, launch

pytestmark = pytest.mark.long

SCENARIO = str(pathlib.Path(__file__).parent / "scenario.py")


def start(name, victim=0, timeout=60):
    return launch([sys.executable, SCENARIO, name, str(victim)], processes=2, timeout=timeout)


@pytest.mark.parametrize("name", ["meetings", "requests"])
def test_processes_communicate_without_failures(name):
    assert start(name) == 0


@pytest.mark.parametrize(
    ("name", "victim", "message", "exit_code"),
    [
        pytest.param("before start", 0, "no such recipe", 2, marks=pytest.mark.slow),
        pytest.param("before start", 1, "no such recipe", 2, marks=pytest.mark.slow),
        pytest.param("refused", 0, "the folder is in use", 2, marks=pytest.mark.slow),
        pytest.param("mkdir", 1, "FileNotFoundError: [Errno 2]", 1, marks=pytest.mark.slow),
        ("mkdir", 0, "FileNotFoundError: [Errno 2]", 1),
        ("loop", 0, "the loss is NaN", 2),
        pytest.param("loop", 1, "the loss is NaN", 2, marks=pytest.mark.slow),
        pytest.param("bug", 0, "ZeroDivisionError: a bug", 1, marks=pytest.mark.slow),
        ("bug", 1, "ZeroDivisionError: a bug", 1),
        pytest.param("busy", 0, "failed while the other was busy", 2, marks=pytest.mark.slow),
        pytest.param("busy", 1, "failed while the other was busy", 2, marks=pytest.mark.slow),
        pytest.param("SIGKILL", 0, "it was killed by SIGKILL", 137, marks=pytest.mark.slow),
        pytest.param("SIGKILL", 1, "it was killed by SIGKILL", 137, marks=pytest.mark.slow),
    ],
)
def test_case_the_failure_of_one_ends_both(name, victim, message, exit_code):
    began = time.monotonic()
    with pytest.raises(LaunchFailed) as caught:
        start(name, victim)
    assert f"process {victim} of 2 failed: {message}" in str(caught.value)
    assert caught.value.exit_code == exit_code
    assert time.monotonic() - began < 200


@pytest.mark.slow
def test_a_process_may_close_slowly_after_a_signal(capfd):
    with pytest.raises(LaunchFailed, match="SIGTERM: the run stops") as caught:
        start("stop", victim=1)
    assert caught.value.exit_code == 75
    out, err = capfd.readouterr()
    assert "[1] closed" in out and "[1] axcore: process 0 of 2 failed" not in err


def test_waiting_for_missing_processes_times_out():
    """As in a shell under `srun --pty -n 8`, which sets the variables of a task."""
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "localhost", "NTASKS": "8", "PROCID": "0", "LOCALID": "0"}
    done = subprocess.run(
        [sys.executable, SCENARIO, "meetings", "0"],
        env=os.environ | {f"SLURM_{name}": value for name, value in slurm.items()} | {"AXCORE_TIMEOUT": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 81, done.stderr
    first, *_, last = done.stderr.splitlines()
    assert first == "process 0 of 8 (slurm): waiting for 7 others"
    assert "process 0 of 8 (slurm) waited 2 s for 7 others" in last and "AXCORE_PROCESSES=1 to run alone" in last


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = {"AXCORE_COORDINATOR": address, "AXCORE_PROCESSES": "2", "AXCORE_PROCESS_ID": "0"}
        done = subprocess.run([sys.executable, SCENARIO, "meetings", "0"], env=os.environ | run, capture_output=True)
    assert f"cannot listen on {address}: Address already in use" in done.stderr.decode()


def test_case_a_process_that_hangs_with_a_heartbeat_ends_both():
    with pytest.raises(LaunchFailed, match=r"process 0 of 2 failed: process 0 of 2 .*waited 5 s for a step") as caught:
        start("hang", victim=1, timeout=5)
    assert caught.value.exit_code == 81


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_hanging_process_ends_both_after_the_heartbeat_timeout(victim):
    with pytest.raises(LaunchFailed, match=f"process {victim} of 2 failed: it was killed because") as caught:
        start("SIGSTOP", victim, timeout=10)
    assert caught.value.exit_code == 81
