"""Communication between the processes of a run outside of jit, with timeouts. With one process, nothing waits.

Messages go through the key-value store of the coordination service and use no device. They work while devices compute,
and a waiting process ends when another one fails. Every process must make the same calls with the same names in the
same order. Use them for small values at a few points of a run, not in every step.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Iterator

from axcore.config import AxcoreError
from axcore.runtime.cluster import TIMEOUT
from axcore.runtime.errors import PeerFailed, RuntimeTimeout
from axcore.runtime.process_group import ProcessGroup, count as count, index as index, process_group
from axcore.runtime.watcher import failure_store

DEFAULT_TIMEOUT = 600.0
SLICE_SECONDS = 0.5
"""Seconds between two checks for failures of other processes while waiting."""

_calls: collections.Counter[str] = collections.Counter()


def default_timeout() -> float:
    """Seconds that a process waits for the others: `AXCORE_TIMEOUT`, or 600 if unset."""
    text = os.environ.get(TIMEOUT, "")
    if not text:
        return DEFAULT_TIMEOUT
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise AxcoreError(f"{TIMEOUT}={text!r} must be a positive number of seconds")


def gather(name: str, value: bytes, timeout: float | None = None) -> list[bytes]:
    """The values of all processes, ordered by process index.

    Args:
        name: name of the synchronization point, for messages. It may be reused.
        value: the value of this process.
        timeout: seconds to wait for the others. None uses `AXCORE_TIMEOUT`, or 600.

    Raises:
        PeerFailed: another process failed.
        RuntimeTimeout: another process did not make this call in time.
    """
    group = process_group()
    if group is None:
        return [value]
    seconds = default_timeout() if timeout is None else timeout
    number = _calls[name]
    _calls[name] += 1
    group.store.key_value_set_bytes(f"{_key(name, number)}/{group.index}", value)
    deadline = time.monotonic() + seconds
    values = [_get(group, name, number, process, deadline, seconds) for process in range(group.count)]
    if number:  # all processes have made this call, so all have read the values of the previous call
        group.store.key_value_delete(f"{_key(name, number - 1)}/{group.index}")
    return values


def barrier(name: str, timeout: float | None = None) -> None:
    """Waits until every process has made this call. Raises like `gather`."""
    gather(name, b"", timeout)


@contextlib.contextmanager
def together(name: str, timeout: float | None = None) -> Iterator[None]:
    """Shares errors inside the block: if one process raises, all others raise `PeerFailed` at the end of the block.

    Inside the block, a process must not wait for the others. Raises like `gather` at the end.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if process_group() is None:
            raise
        failure = error
    text = "" if failure is None else str(failure) if isinstance(failure, AxcoreError) else repr(failure)
    try:
        found = gather(name, text.encode(), timeout)
    finally:
        if failure is not None:  # even if the exchange itself failed
            raise failure
    for process, told in enumerate(found):
        if told:
            raise PeerFailed(f"process {process} of {len(found)} failed: {told.decode()}")


def _key(name: str, number: int) -> str:
    return f"axcore/meet/{name}/{number}"


def _get(group: ProcessGroup, name: str, number: int, process: int, deadline: float, seconds: float) -> bytes:
    from jax.errors import JaxRuntimeError

    while True:
        left = deadline - time.monotonic()
        try:
            wait = max(0.001, min(SLICE_SECONDS, left))
            return group.store.blocking_key_value_get_bytes(f"{_key(name, number)}/{process}", int(1000 * wait))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        failures = failure_store()
        if failures is not None and (failure := failures.read()) is not None:
            raise failure.as_peer_failure(group)
        if left <= 0:
            arrived = {
                int(key.rpartition("/")[2]) for key, _ in group.store.key_value_dir_get_bytes(_key(name, number))
            }
            missing = [str(each) for each in range(group.count) if each not in arrived]
            who = f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)}"
            raise RuntimeTimeout(
                f"{group.named(group.index)} waited {seconds:g} s at {name!r} for {who}, which "
                f"did not arrive. Check the output of each missing process, or increase {TIMEOUT} (seconds) if it is "
                f"just slow."
            )
