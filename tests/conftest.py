"""End-to-end tests: a small corpus, a small recipe, and the `axcore` command."""

import dataclasses
import importlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

PROGRESS = ("step ", "compiling ", "resuming ", "no checkpoint yet", "evaluating")
"""Prefixes of progress messages."""

TINY_PLUGIN = pathlib.Path(__file__).parent / "tiny_plugin"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of 40 texts whose bytes are easier to predict with context than without."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ["banana", "orange", "kiwi", "papaya", "lemon"]
    rng = random.Random(0)
    for number in range(40):
        text = " ".join(rng.choice(words) for _ in range(60)) + "\n"
        (folder / f"{number:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def tiny_on_path():
    """Makes the plugin `tiny` of `tests/tiny_plugin` importable and discoverable."""
    sys.path.insert(0, str(TINY_PLUGIN))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(TINY_PLUGIN))


@pytest.fixture
def fresh_registry():
    """Resets plugin discovery before and after the test."""
    from axcore.plugin import registry

    registry.cache_clear()
    yield
    registry.cache_clear()


@pytest.fixture(scope="session")
def tiny(tiny_on_path, corpus):
    """The config of the recipe `tiny` on the small corpus, with RoPE."""
    from axcore_tiny import recipes

    import axcore as ax

    cfg = ax.pipe(recipes.tiny(), ax.use("rope"))
    return ax.override(cfg, [f"input.source.folder={corpus}"])


@dataclasses.dataclass
class Finished:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def message(self):
        """The message of a command that failed with exit code 2 and printed nothing else to stderr except progress."""
        assert self.code == 2, self
        assert "Traceback" not in self.err + self.out, self.err
        lines = [line for line in self.err.splitlines() if not line.startswith(PROGRESS)]
        if lines and lines[0].startswith("usage: "):  # argparse shows the usage first
            lines = lines[-1:]
        assert lines and lines[0].startswith("axcore"), self.err
        assert sum(line.startswith("axcore") for line in lines) == 1, self.err
        return "\n".join(lines)


@pytest.fixture
def axcore(tiny_on_path, fresh_registry, capfd, tmp_path, monkeypatch):
    """Runs the `axcore` command in this process, below an empty folder: `axcore("plugins").out`."""
    from axcore.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*argv):
        capfd.readouterr()
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return Finished(code, out, err)

    return run


class Process:
    """An `axcore` command in a separate process."""

    def __init__(self, server, pid, stdout, stderr):
        self._server, self.pid, self._stdout, self._stderr = server, pid, stdout, stderr
        self.code = None

    def poll(self):
        if self.code is None:
            self.code = self._server.ask({"wait": self.pid})["status"]
        return self.code

    def wait(self, seconds=600):
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"not done after {seconds} s:\n{self._stderr.read_text()}")
            time.sleep(0.02)
        out = self._stdout.read_text() if self._stdout else ""
        return Finished(self.code, out, self._stderr.read_text())

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.002)

    def kill_when(self, condition, seconds=600):
        """Kills the process as soon as `condition()` holds. Returns whether it was still running."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            for _ in range(20):  # polling the process is slower than the condition
                if condition():
                    self.kill()
                    return self.code == -signal.SIGKILL
                time.sleep(0.002)
            assert time.monotonic() < deadline, f"waited {seconds} s:\n{self._stderr.read_text()}"
        return False


class Server:
    """Starts `axcore` commands; see `axcore_tiny.server`."""

    def __init__(self, folder):
        self.folder, self.started = folder, 0
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TINY_PLUGIN), *filter(None, sys.path)])}
        env.pop("PYTHONUNBUFFERED", None)  # it would hide errors while flushing stdout
        command = [sys.executable, "-m", "axcore_tiny.server"]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, (self.folder / "log").read_text()
        return json.loads(answer)

    def start(self, *argv, cwd=None, prepare="", env=None, reader=True):
        """Starts `axcore ARGV...`.

        Args:
            cwd: working directory; a new one by default.
            prepare: code that the process runs first.
            env: additional environment variables.
            reader: False closes the reading end of its stdout.
        """
        self.started += 1
        own = self.folder / str(self.started)
        own.mkdir()
        stdout, stderr = own / "stdout" if reader else None, own / "stderr"
        job = {
            "argv": [str(arg) for arg in argv],
            "cwd": str(cwd or own),
            "prepare": prepare,
            "env": env or {},
            "stdout": str(stdout) if stdout else None,
            "stderr": str(stderr),
        }
        return Process(self, self.ask(job)["pid"], stdout, stderr)


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """Starts `axcore` commands in separate processes: `processes.start("train", "tiny").wait().code`."""
    server = Server(tmp_path_factory.mktemp("processes"))
    yield server
    server.process.stdin.close()
    server.process.wait()


@pytest.fixture(scope="session")
def snapshot():
    """A function from a folder to the (modification time, content) of every file, by path."""

    def of(folder):
        return {
            str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(pathlib.Path(folder).rglob("*"))
            if path.is_file()
        }

    return of
