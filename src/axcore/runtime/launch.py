"""Starts the processes of a run on this machine, and ends them together."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO, TextIO

from axcore.config import AxcoreError
from axcore.runtime import signals
from axcore.runtime.cluster import COORDINATOR, PROCESS_ID, PROCESSES
from axcore.runtime.exit_codes import ExitCode
from axcore.runtime.failures import ERROR_FILE, Failure, first
from axcore.runtime.processes import TIMEOUT

POLL_SECONDS = 0.05
ENDING_SECONDS = 15.0
"""How long the others may take to end after one has failed."""
STOPPING_SECONDS = 600.0
"""How long the others may take to end after one has saved its state and stopped."""


class LaunchFailed(AxcoreError):
    """The run of `axcore launch` failed. The message and the exit code are those of the process that failed first."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def launch(
    command: Sequence[str],
    *,
    processes: int,
    timeout: float | None = None,
    devices_per_process: int | None = None,
) -> int:
    """Runs a program in several processes and returns 0 when all have succeeded.

    Each line that a process prints begins with its number. SIGINT and SIGTERM go to each process once; a second one
    kills them.

    Args:
        command: the program and its arguments. It calls `axcore.runtime.start`, as `axcore train` does.
        processes: how many.
        timeout: seconds that a process waits for the others; None: `AXCORE_TIMEOUT`, or 600.
        devices_per_process: devices that each process uses, in order; None: one.

    Raises:
        AxcoreError: an argument cannot be used, or a process cannot be started.
        LaunchFailed: a process failed. The others were ended.
    """
    for name, value in (("processes", processes), ("devices-per-process", devices_per_process)):
        if value is not None and value < 1:
            raise AxcoreError(f"--{name} must be 1 or more, not {value}")
    if timeout is not None and not timeout > 0:
        raise AxcoreError(f"--timeout must be a positive number of seconds, not {timeout:g}")
    with tempfile.TemporaryDirectory(prefix="axcore-launch-") as folder:
        children: list[_Child] = []
        with _forwarding(children) as killed:
            try:
                coordinator = f"127.0.0.1:{_free_port()}"
                for index in range(processes):
                    environ = _environment(index, processes, coordinator, timeout, devices_per_process)
                    children.append(_Child(index, command, environ, pathlib.Path(folder) / f"{index}.json"))
                _wait(children, killed)
            finally:
                for child in children:
                    child.end()
        return _verdict(children)


def _environment(
    index: int, processes: int, coordinator: str, timeout: float | None, devices: int | None
) -> dict[str, str]:
    mine = range(index * (devices or 1), (index + 1) * (devices or 1))
    environ = {
        **os.environ,
        COORDINATOR: coordinator,
        PROCESSES: str(processes),
        PROCESS_ID: str(index),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, mine)),
        "PYTHONUNBUFFERED": "1",
    }
    if timeout is not None:
        environ[TIMEOUT] = f"{timeout:g}"
    if devices is not None:
        environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    return environ


class _Child:
    """One process of the run, in a session of its own, so that the terminal sends it no signals."""

    def __init__(self, index: int, command: Sequence[str], environ: dict[str, str], error_file: pathlib.Path):
        self.index, self.error_file = index, error_file
        self.ended_at: float | None = None
        self.killed = False
        try:
            self.process = subprocess.Popen(
                command,
                env=environ | {ERROR_FILE: str(error_file)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise AxcoreError(f"cannot start process {index}: {error}") from error
        self.copiers = [
            threading.Thread(target=_copy, args=(index, source, sink), daemon=True)
            for source, sink in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        ]
        for copier in self.copiers:
            copier.start()

    def running(self) -> bool:
        if self.process.poll() is None:
            return True
        if self.ended_at is None:
            self.ended_at = time.time()
        return False

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self) -> None:
        """Kills it and what it started, if it still runs, and prints the rest of its output."""
        if self.running():
            self.killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for copier in self.copiers:
            copier.join(timeout=5)

    def failure(self) -> Failure | None:
        """Why it failed, by its own words or by its exit status."""
        code = self.process.returncode
        if code == 0:
            return None
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Failure.from_json(self.error_file.read_bytes())
        ended_at = self.ended_at or time.time()
        if self.killed:
            return Failure(
                self.index, "it did not end when the others had, and was killed", ExitCode.TIMED_OUT, ended_at
            )
        if code == -signal.SIGABRT:  # jax aborts a process that lost its connection to another one
            return Failure(self.index, "it lost its connection to another process", ExitCode.PEER_FAILED, ended_at)
        if code < 0:
            return Failure(self.index, f"it was killed by {signal.Signals(-code).name}", 128 - code, ended_at)
        return Failure(self.index, f"it ended with exit code {code}; see its output", code, ended_at)


def _copy(index: int, source: IO[bytes], sink: TextIO) -> None:
    """Copies lines, each with the number of the process before it."""
    for line in source:
        text = line.decode(errors="replace")
        with contextlib.suppress(OSError, ValueError):  # a reader that has gone does not end the run
            sink.write(f"[{index}] {text}" if text.endswith("\n") else f"[{index}] {text}\n")
            sink.flush()


@contextlib.contextmanager
def _forwarding(children: list[_Child]) -> Iterator[threading.Event]:
    """While it is active, a signal to this process goes to each child. Gives the event of a second signal."""
    killed = threading.Event()
    received: list[float] = []

    def forward(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not received:
            received.append(now)
            for child in children:
                child.send(number)
        elif now - received[0] > signals.SAME_SIGNAL_SECONDS:
            killed.set()

    with signals.replaced(forward):
        yield killed


def _wait(children: list[_Child], killed: threading.Event) -> None:
    """Returns when all have ended, or when they had enough time after the first failure."""
    deadline = None
    while any([child.running() for child in children]) and not killed.is_set():
        failures = [failure for child in children if not child.running() and (failure := child.failure()) is not None]
        if failures and deadline is None:
            stopping = all(each.is_stop for each in failures)
            deadline = time.monotonic() + (STOPPING_SECONDS if stopping else ENDING_SECONDS)
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)


def _verdict(children: list[_Child]) -> int:
    failure = first([failure for child in children if (failure := child.failure()) is not None])
    if failure is None:
        return ExitCode.DONE
    raise LaunchFailed(f"process {failure.index} of {len(children)} failed: {failure.message}", failure.code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
