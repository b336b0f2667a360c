"""`launch`: environment, output, exit codes and signals of its processes. The processes are plain Python here."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from axcore import AxcoreError
from axcore.runtime import launch as launching
from axcore.runtime.launch import LaunchFailed, launch

PRELUDE = """
import json, os, signal, sys, time
rank = int(os.environ["AXCORE_PROCESS_ID"])
def fail(message, code, seconds=0):
    open(os.environ["AXCORE_ERROR_FILE"], "w").write(
        json.dumps({"index": rank, "message": message, "code": code, "time": time.time() + seconds}))
    os._exit(code)
"""


def start(code, processes=2, **options):
    return launch([sys.executable, "-c", PRELUDE + code], processes=processes, **options)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(launching, "ENDING_SECONDS", 1.0)


def test_each_process_has_its_own_environment_and_output_prefix(capfd):
    code = "names = ('AXCORE_', 'JAX_LOCAL', 'JAX_NUM')\n"
    code += "print(json.dumps({name: v for name, v in os.environ.items() if name.startswith(names)}))\n"
    code += "print('half a line', end='', file=sys.stderr)"
    assert start(code, processes=3, timeout=7, devices_per_process=2) == 0
    out, err = capfd.readouterr()
    lines = sorted(out.splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] "]
    found = [json.loads(line[4:]) for line in lines]
    assert [each["AXCORE_PROCESS_ID"] for each in found] == ["0", "1", "2"]
    assert [each["JAX_LOCAL_DEVICE_IDS"] for each in found] == ["0,1", "2,3", "4,5"]
    assert len({each["AXCORE_ERROR_FILE"] for each in found}) == 3
    shared = ("AXCORE_COORDINATOR", "AXCORE_PROCESSES", "AXCORE_TIMEOUT", "JAX_NUM_CPU_DEVICES")
    (common,) = {tuple(each[name] for name in shared) for each in found}
    assert common[0].startswith("127.0.0.1:") and common[1:] == ("3", "7", "2")
    assert sorted(err.splitlines()) == ["[0] half a line", "[1] half a line", "[2] half a line"]


@pytest.mark.parametrize(
    ("code", "message", "exit_code"),
    [
        ("fail('disk full', 2) if rank == 1 else fail('process 1 failed', 80)", "process 1 of 2 failed: disk full", 2),
        ("fail('later', 2, 5) if rank == 0 else fail('sooner', 82)", "process 1 of 2 failed: sooner", 82),
        ("os._exit(3) if rank == 0 else time.sleep(60)", "process 0 of 2 failed: it exited with code 3", 3),
        ("os.kill(os.getpid(), 9) if rank == 1 else fail('connection closed', 1, -5)", "killed by SIGKILL", 137),
        ("os.abort() if rank == 0 else fail('NaN', 82)", "process 1 of 2 failed: NaN", 82),
        ("os.abort() if rank == 0 else os.kill(os.getpid(), signal.SIGSTOP)", "killed because it did not exit", 81),
        ("fail('saved', 75)", "failed: saved", 75),
    ],
)
def test_the_first_failure_gives_the_message_and_exit_code(code, message, exit_code):
    with pytest.raises(LaunchFailed) as caught:
        start(code)
    assert message in str(caught.value)
    assert caught.value.exit_code == exit_code


def test_a_command_that_cannot_start_is_reported():
    with pytest.raises(AxcoreError, match=r"cannot start process 0: .*No such file"):
        launch(["/no/such/program"], processes=2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"processes": 0}, "--processes must be 1 or more, not 0"),
        ({"processes": -1}, "--processes must be 1 or more, not -1"),
        ({"timeout": 0.0}, "--timeout must be a positive number of seconds, not 0"),
        ({"timeout": float("nan")}, "--timeout must be a positive number of seconds, not nan"),
        ({"devices_per_process": 0}, "--devices-per-process must be 1 or more, not 0"),
    ],
)
def test_invalid_arguments_raise(options, expected):
    with pytest.raises(AxcoreError, match=expected):
        start("", **options)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--processes", "2"], "axcore launch requires a command after --"),
        (["--processes", "2", "--"], "axcore launch requires a command after --"),
        (["--processes", "0", "--", "train", "tiny"], "--processes must be 1 or more, not 0"),
        (["--", "train", "tiny"], "--processes"),
    ],
)
def test_invalid_command_lines_fail(axcore, arguments, expected):
    assert expected in axcore("launch", *arguments).message


LAUNCHER = """
import sys
from axcore.runtime import signals
from axcore.runtime import launch
launch.ENDING_SECONDS = 1.0
signals.install()
try:
    code = launch.launch([sys.executable, "-c", sys.argv[1]], processes=2)
except launch.LaunchFailed as error:
    print(error, file=sys.stderr)
    code = error.exit_code
sys.exit(code)
"""


def send_to_group(child, *numbers):
    """Starts a launcher in its own process group and signals the group like a terminal. Returns (exit code, stdout)."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, PRELUDE + child],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines = [process.stdout.readline(), process.stdout.readline()]
    for number in numbers:
        os.killpg(process.pid, number)
        time.sleep(1.1)
    out, _ = process.communicate(timeout=60)
    return process.returncode, "".join(lines) + out


def test_a_signal_reaches_each_process_once():
    child = "count = []\nsignal.signal(2, lambda *_: count.append(1))\nprint('ready')\n"
    child += "while not count: time.sleep(0.01)\ntime.sleep(1)\nprint('got', len(count)); fail('saved', 130)"
    code, out = send_to_group(child, signal.SIGINT)
    assert code == 130
    assert sorted(out.splitlines()) == ["[0] got 1", "[0] ready", "[1] got 1", "[1] ready"]


def test_a_signal_before_the_processes_start_reaches_them(monkeypatch):
    monkeypatch.setattr(launching, "_free_port", lambda: signal.raise_signal(signal.SIGTERM) or 1)
    with pytest.raises(LaunchFailed, match="killed by SIGTERM") as caught:
        start("time.sleep(60)")
    assert caught.value.exit_code == 143


def test_a_second_signal_kills_processes_that_do_not_stop():
    child = "signal.signal(15, lambda *_: print('later', flush=True))\nprint('ready')\nwhile True: time.sleep(0.01)"
    began = time.monotonic()
    code, out = send_to_group(child, signal.SIGTERM, signal.SIGTERM)
    assert code == 81 and out.count("later") == 2
    assert time.monotonic() - began < 60
