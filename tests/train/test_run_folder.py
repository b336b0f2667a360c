"""Run folders: atomic files, clear errors, and one writer at a time."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys

import pytest

from axcore.config import AxcoreError
from axcore.train import WarmupStableDecay, files
from axcore.train.run import folder as run_folder
from axcore.train.run.budget import Budget


def test_create_makes_parents_and_is_repeatable(tmp_path):
    folder = run_folder.create(tmp_path / "a" / "b")
    assert folder.is_dir() and folder.is_absolute()
    assert run_folder.create(folder) == folder
    assert list(folder.iterdir()) == []


def test_create_raises_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AxcoreError, match=r"the run folder .*/file is a file"):
        run_folder.create(tmp_path / "file")
    with pytest.raises(AxcoreError, match=r"cannot write to the run folder .*/file/run: Not a directory"):
        run_folder.create(tmp_path / "file" / "run")
    with pytest.raises(AxcoreError, match=r"cannot write to the run folder /proc/run: No such file"):
        run_folder.create("/proc/run")
    with pytest.raises(AxcoreError, match=r"cannot write to the run folder /proc: "):
        run_folder.create("/proc")


def test_written_files_have_the_given_content(tmp_path):
    files.write_bytes(tmp_path / "b", b"\0\r\n")
    files.write_text(tmp_path / "t", "é\n")
    files.write_json(tmp_path / "j", {"x": [1, 0.1 + 0.2]})
    assert (tmp_path / "b").read_bytes() == b"\0\r\n"
    assert (tmp_path / "t").read_bytes() == "é\n".encode()
    assert json.loads((tmp_path / "j").read_text()) == {"x": [1, 0.1 + 0.2]}
    files.write_json(tmp_path / "j", {"x": [float("nan"), float("-inf"), "NaN"]})
    assert json.loads((tmp_path / "j").read_text()) == {"x": ["NaN", "-Infinity", "NaN"]}
    assert sorted(os.listdir(tmp_path)) == ["b", "j", "t"]


def test_a_failed_write_leaves_the_old_file_unchanged(tmp_path):
    path = tmp_path / "summary.json"
    files.write_bytes(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(AxcoreError, match=r"cannot write .*summary\.json: File too large"):
            files.write_bytes(path, bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_new_file_is_complete_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    seen = []
    replace = os.replace

    def watched(source, target):
        seen.append((pathlib.Path(source).read_bytes(), pathlib.Path(target).read_bytes()))
        replace(source, target)

    path = tmp_path / "config.txt"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "replace", watched)
    files.write_bytes(path, b"new")
    assert seen == [(b"new", b"old")] and path.read_bytes() == b"new"


def test_move_aside_finds_a_free_name(tmp_path):
    for number in (1, 2):
        folder = run_folder.create(tmp_path / "run")
        (folder / "config.txt").write_text(str(number))
        assert run_folder.move_aside(folder) == tmp_path / f"run.{number}"
        assert not folder.exists()
    assert (tmp_path / "run.1/config.txt").read_text() == "1"
    assert (tmp_path / "run.2/config.txt").read_text() == "2"


HOLD = """
import os, pathlib, runpy, sys
lock = runpy.run_path(os.environ["RUN_FOLDER"])["Lock"](pathlib.Path(sys.argv[1]))  # without jax
if len(sys.argv) == 2 or os.fork() == 0:
    print("held", flush=True)
    if sys.argv[2:] == ["exec"]:
        os.execvp("sleep", ["sleep", "20"])
sys.stdin.read()
"""


def hold(folder, *extra):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RUN_FOLDER": run_folder.__file__}
    command = [sys.executable, "-c", HOLD, str(folder), *extra]
    child = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    assert child.stdout.readline() == b"held\n"
    return child


def test_the_lock_rejects_a_second_process_and_names_the_first(tmp_path):
    child = hold(tmp_path)
    try:
        with pytest.raises(AxcoreError, match=rf"is in use by process {child.pid} on \S+\. Stop that run"):
            run_folder.Lock(tmp_path)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("extra", [(), ("fork",), ("exec",)])
def test_a_killed_process_releases_the_lock_despite_its_children(tmp_path, extra):
    child = hold(tmp_path, *extra)
    try:
        child.send_signal(signal.SIGKILL)
        child.wait()
        with run_folder.Lock(tmp_path):
            pass
    finally:
        if extra:
            os.killpg(child.pid, signal.SIGKILL)


def test_a_lock_is_exclusive_until_it_is_released(tmp_path):
    with run_folder.Lock(tmp_path), pytest.raises(AxcoreError, match=f"in use by process {os.getpid()}"):
        run_folder.Lock(tmp_path)
    lock = run_folder.Lock(tmp_path)
    lock.release()
    lock.release()
    run_folder.Lock(tmp_path).release()


def test_a_lock_in_an_unwritable_folder_raises():
    with pytest.raises(AxcoreError, match="cannot write to the run folder /proc/run"):
        run_folder.Lock(pathlib.Path("/proc/run"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"total_steps": 5}', '{"total_steps": "5", "decided_at": 1}'])
def test_case_a_damaged_plan_is_named(tmp_path, content):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(
        AxcoreError, match=r"cannot read .*plan\.json: .* must be JSON with the integers .* or remove it"
    ):
        Budget(1.0, WarmupStableDecay(peak=1.0), tmp_path, began=0.0)
