"""Requests of one process that all processes act on at the same step, such as stopping after a signal."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from types import TracebackType
from typing import Self

from axcore.runtime.errors import RuntimeTimeout
from axcore.runtime.process_group import ProcessGroup, process_group
from axcore.runtime.processes import default_timeout
from axcore.runtime.watcher import peer_failure

POLL_SECONDS = 0.25

_made = 0


class Requests:
    """Makes all processes act on a request of one process at the same step.

    ```python
    with Requests() as requests:
        for step in range(steps):
            if "stop" in requests.due():
                break  # before the same step on every process
            state = train_step(state)
    ```

    Every process creates a `Requests` and calls `due` at the same points of its work, such as between steps or between
    the batches of an evaluation. With one process, a request is due at the next call.

    With several processes, `due` only takes a lock while there is no request. After a request, a background thread of
    each process posts the number of its next call of `due`, even while the main thread waits for a device. The request
    is due at the call with the highest posted number. Processes wait for all numbers before they continue.
    """

    def __init__(self) -> None:
        global _made
        self._made: set[str] = set()
        self._lock = threading.Condition()
        self._group = process_group()
        if self._group is not None:
            self._number, _made = _made, _made + 1
            self._calls = 0
            self._round = 0
            self._posted = False
            self._agreed: tuple[int, set[str]] | None = None
            self._closed = threading.Event()
            self._thread = threading.Thread(
                target=self._negotiate, args=(self._group,), name="axcore-requests", daemon=True
            )
            self._thread.start()

    def make(self, name: str) -> None:
        """Asks all processes to act on `name`. Thread-safe and idempotent."""
        with self._lock:
            self._made.add(name)

    def due(self) -> set[str]:
        """The requests to act on now, equal on every process.

        Raises:
            PeerFailed: another process failed.
            RuntimeTimeout: another process did not answer in time.
        """
        if self._group is None:
            with self._lock:
                due, self._made = self._made, set()
            return due
        if (failure := peer_failure()) is not None:
            raise failure
        with self._lock:
            if self._posted:
                self._wait_for_agreement(self._group)
            call, self._calls = self._calls, self._calls + 1
            if self._agreed is None or self._agreed[0] != call:
                return set()
            due, self._agreed = self._agreed[1], None
            self._made -= due
            self._round, self._posted = self._round + 1, False
            return due

    def close(self) -> None:
        """Ends the background thread, and answers processes that still wait for an agreement."""
        if self._group is None or self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(timeout=5)
        with self._lock, contextlib.suppress(Exception):  # the others may have exited
            self._post(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_for_agreement(self, group: ProcessGroup) -> None:
        seconds = default_timeout()
        deadline = time.monotonic() + seconds
        while self._agreed is None:
            self._lock.wait(POLL_SECONDS)
            if (failure := peer_failure()) is not None:
                raise failure
            if time.monotonic() > deadline:
                raise RuntimeTimeout(f"{group.named(group.index)} waited {seconds:g} s for an answer to a request")

    def _key(self) -> str:
        return f"axcore/requests/{self._number}/{self._round}"

    def _post(self, group: ProcessGroup) -> None:
        if not self._posted:
            answer = {"call": self._calls, "names": sorted(self._made)}
            group.store.key_value_set_bytes(f"{self._key()}/{group.index}", json.dumps(answer).encode())
            self._posted = True

    def _negotiate(self, group: ProcessGroup) -> None:
        """Posts this process's answer to a request and reads the answers of the others. Runs in the background."""
        while not self._closed.wait(POLL_SECONDS):
            with contextlib.suppress(Exception):  # if the service is gone, jax ends the process itself
                if self._made or group.store.key_value_dir_get_bytes(self._key()):
                    with self._lock:
                        self._agree(group)

    def _agree(self, group: ProcessGroup) -> None:
        if self._agreed is not None:
            return
        self._post(group)
        answers = group.store.key_value_dir_get_bytes(self._key())
        if len(answers) == group.count:
            found = [json.loads(value) for _, value in answers]
            self._agreed = (max(each["call"] for each in found), {name for each in found for name in each["names"]})
            self._lock.notify_all()
