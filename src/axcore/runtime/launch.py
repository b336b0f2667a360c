"""Starts the processes of a run on this machine and ends them together."""

from __future__ import annotations

import contextlib
import dataclasses
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
from axcore.runtime.cluster import COORDINATOR, PROCESS_ID, PROCESSES, TIMEOUT
from axcore.runtime.exit_codes import ExitCode
from axcore.runtime.failures import ERROR_FILE, Failure, first

POLL_SECONDS = 0.05
ENDING_SECONDS = 15.0
"""Seconds that other processes have to exit after one has failed."""
STOPPING_SECONDS = 600.0
"""Seconds that other processes have to exit after one has saved its state and stopped."""


class LaunchFailed(AxcoreError):
    """A run of `axcore launch` failed. The message and the exit code come from the process that failed first."""

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
    """Runs a program in several processes and returns 0 when all of them succeed.

    Output lines are prefixed with the index of the process. The first SIGINT or SIGTERM is forwarded to every process.
    A second signal kills them.

    Args:
        command: the program and its arguments. It must call `axcore.runtime.start`, as `axcore train` does.
        processes: the number of processes.
        timeout: seconds that a process waits for the others. None uses `AXCORE_TIMEOUT`, or 600.
        devices_per_process: number of devices of each process, assigned in order. None means one.

    Raises:
        AxcoreError: an argument is invalid, or a process cannot be started.
        LaunchFailed: a process failed. The other processes have ended.
    """
    for name, value in (("processes", processes), ("devices-per-process", devices_per_process)):
        if value is not None and value < 1:
            raise AxcoreError(f"--{name} must be 1 or more, not {value}")
    if timeout is not None and not timeout > 0:
        raise AxcoreError(f"--timeout must be a positive number of seconds, not {timeout:g}")
    with tempfile.TemporaryDirectory(prefix="axcore-launch-") as folder:
        children: list[_Child] = []
        with _forwarding(children) as forwarded:
            try:
                coordinator = f"127.0.0.1:{_free_port()}"
                for index in range(processes):
                    environ = _environment(index, processes, coordinator, timeout, devices_per_process)
                    children.append(_Child(index, command, environ, pathlib.Path(folder) / f"{index}.json"))
                    if forwarded.number is not None:  # the signal arrived before this process existed
                        children[-1].send(forwarded.number)
                _wait(children, forwarded)
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
    """One process of the run. It has its own session, so that the terminal does not send it signals."""

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
        """Kills the process and its descendants if they still run, and prints the remaining output."""
        if self.running():
            self.killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for copier in self.copiers:
            copier.join(timeout=5)

    def failure(self) -> Failure | None:
        """The failure that the process recorded, or one that describes its exit status."""
        code = self.process.returncode
        if code == 0:
            return None
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Failure.from_json(self.error_file.read_bytes())
        ended_at = self.ended_at or time.time()
        if self.killed:
            return Failure(
                self.index, "it was killed because it did not exit after the others", ExitCode.TIMED_OUT, ended_at
            )
        if code == -signal.SIGABRT:  # jax aborts a process that loses its connection to another process
            return Failure(self.index, "it lost its connection to another process", ExitCode.PEER_FAILED, ended_at)
        if code < 0:
            return Failure(self.index, f"it was killed by {signal.Signals(-code).name}", 128 - code, ended_at)
        return Failure(self.index, f"it exited with code {code}; see its output", code, ended_at)


def _copy(index: int, source: IO[bytes], sink: TextIO) -> None:
    """Copies lines, each prefixed with the index of the process."""
    for line in source:
        text = line.decode(errors="replace")
        with contextlib.suppress(OSError, ValueError):  # a closed pipe must not end the run
            sink.write(f"[{index}] {text}" if text.endswith("\n") else f"[{index}] {text}\n")
            sink.flush()


@dataclasses.dataclass
class _Forwarded:
    """The effect of signals to this process.

    Attributes:
        number: the signal that was forwarded to the children.
        killed: whether a second signal arrived, which kills them.
    """

    number: int | None = None
    killed: bool = False


@contextlib.contextmanager
def _forwarding(children: list[_Child]) -> Iterator[_Forwarded]:
    """Forwards signals of this process to each child while active."""
    forwarded = _Forwarded()
    since = 0.0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal since
        now = time.monotonic()
        if forwarded.number is None:
            forwarded.number, since = number, now
            for child in children:
                child.send(number)
        elif now - since > signals.SAME_SIGNAL_SECONDS:
            forwarded.killed = True

    with signals.replaced(forward):
        yield forwarded


def _wait(children: list[_Child], forwarded: _Forwarded) -> None:
    """Waits until all children have exited, but at most `ENDING_SECONDS` after a failure and `STOPPING_SECONDS` after a
    stop."""
    deadline = None
    while any([child.running() for child in children]) and not forwarded.killed:
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
