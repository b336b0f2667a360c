"""Ends this process when another process of the run fails or hangs, even while this process waits for a device."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from axcore.config import AxcoreError
from axcore.runtime.cluster import TIMEOUT
from axcore.runtime.errors import PeerFailed, RuntimeTimeout
from axcore.runtime.exit_codes import ExitCode
from axcore.runtime.failures import Failure, FailureStore, record
from axcore.runtime.process_group import ProcessGroup, process_group

POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""Seconds that a process has to end by itself after another has failed. A device computation that waits for the failed
process never ends."""
LEFT = "axcore/left"
_LOST_CONNECTION = re.compile("Connection (closed|reset) by peer|remote process exited")
"""In the messages of Gloo (CPUs) and NCCL (GPUs) when another process has ended."""

_watcher: _Watcher | None = None
_watches = 0
_failed: Failure | None = None


def failure_store() -> FailureStore | None:
    """The failure store of the current `watch`, or None outside of one."""
    return None if _watcher is None else _watcher.failures


def peer_failure() -> AxcoreError | None:
    """The failure of another process, if this process has already received it. Does not communicate."""
    if _watcher is None or _watcher.received is None:
        return None
    return _watcher.received.as_peer_failure(_watcher.group)


@contextlib.contextmanager
def watch() -> Iterator[None]:
    """While active, the failure of one process ends all of them. Does nothing with one process or when nested.

    An exception that leaves the block is sent to the other processes, unless a signal caused it. They raise
    `PeerFailed` at their next call of `gather` or `Requests.due`. A process that makes no such call in time, because it
    waits for a device, exits with the message and `ExitCode.PEER_FAILED`.
    """
    global _watcher, _watches, _failed
    group = process_group()
    if group is None or _watcher is not None:
        yield
        return
    if _watches == 0:
        atexit.register(_leave_after_uncaught_error)
    _watches, _failed = _watches + 1, None
    _watcher = _Watcher(group, FailureStore(group, _watches))
    _watcher.start()
    try:
        yield
    except BaseException as error:
        received = _watcher.read()
        if received is not None and received.is_cause and not isinstance(error, AxcoreError):
            consequence = received.as_peer_failure(
                group
            )  # replaces errors such as "connection closed" from a computation
            _tell(_watcher, consequence)
            raise consequence from error
        if received is None and _is_lost_connection(error):
            lost = PeerFailed(
                f"{group.named(group.index)} lost its connection to another process, which was probably killed. See "
                f"the output of the others and the logs of their hosts. A computation on all devices failed: {error}"
            )
            _tell(_watcher, lost)
            raise lost from error
        _tell(_watcher, error)
        raise
    finally:
        _watcher.stop.set()
        _watcher = None


@contextlib.contextmanager
def waiting(what: str, seconds: float) -> Iterator[None]:
    """Ends all processes if the block takes longer. Use it to wait for a computation on the devices of all processes,
    which never ends if one of them hangs. Does nothing outside of `watch`."""
    watcher = _watcher
    if watcher is None:
        yield
        return
    watcher.waits_for = (what, seconds, time.monotonic() + seconds)
    try:
        yield
    finally:
        watcher.waits_for = None


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a computation failed because another process has ended."""
    import jax  # loaded already, since there are several processes

    return isinstance(error, jax.errors.JaxRuntimeError) and _LOST_CONNECTION.search(str(error)) is not None


def _tell(watcher: _Watcher, error: BaseException) -> None:
    global _failed
    record(error)
    _failed = Failure.of(error, watcher.group.index)
    if _failed.is_stop:  # not posted: the others stop too, and closing may take them longer
        return
    with contextlib.suppress(Exception):
        watcher.failures.post(_failed)


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code.

    A failing process skips Python's normal exit, where jax would wait for the other processes and abort. Process 0
    hosts the coordination service, so it waits up to 10 seconds for the others to leave.
    """
    group = process_group()
    if group is None or code == ExitCode.DONE:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(Exception):  # the service may have ended
        group.store.key_value_set_bytes(f"{LEFT}/{group.index}", b"", True)
        deadline = time.monotonic() + 2 * GRACE_SECONDS
        while group.index == 0 and time.monotonic() < deadline:
            if len(group.store.key_value_dir_get_bytes(LEFT)) == group.count:
                break
            time.sleep(0.05)
    os._exit(code)


def _leave_after_uncaught_error() -> None:
    """Exit hook for scripts. jax's own hook would wait for processes that have ended."""
    if _failed is not None and getattr(sys, "last_exc", None) is not None:
        leave(_failed.code)


class _Watcher(threading.Thread):
    """Thread that polls for failures of the other processes."""

    def __init__(self, group: ProcessGroup, failures: FailureStore):
        super().__init__(name="axcore-watch", daemon=True)
        self.group, self.failures = group, failures
        self.stop = threading.Event()
        self.received: Failure | None = None
        self.waits_for: tuple[str, float, float] | None = None

    def read(self) -> Failure | None:
        """The failure of another process, if the store can be read."""
        with contextlib.suppress(Exception):  # if the service is gone, jax ends the process itself
            self.received = self.failures.read()
        return self.received

    def run(self) -> None:
        while self.read() is None:
            if self.stop.wait(POLL_SECONDS):
                return
            if (wait := self.waits_for) is not None and time.monotonic() > wait[2]:
                error = RuntimeTimeout(
                    f"{self.group.named(self.group.index)} waited {wait[1]:g} s for {wait[0]}, which the devices of "
                    f"all processes compute. Another process hangs; check the output of each. If the computation is "
                    f"just slow, increase {TIMEOUT} (seconds)."
                )
                _tell(self, error)
                self._end(error)
        if self.received is None or self.stop.wait(GRACE_SECONDS):
            return
        self._end(self.received.as_peer_failure(self.group))

    def _end(self, error: AxcoreError) -> NoReturn:
        print(f"axcore: {error}", file=sys.stderr)
        record(error)
        leave(error.exit_code)
