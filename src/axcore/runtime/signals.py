"""Handlers of SIGINT and SIGTERM: a run stops after the current step and saves; other commands end immediately.

A handler that raises would lose signals: Python drops an exception raised inside a garbage-collection callback or
`__del__`, and jax registers such a callback. These handlers therefore never raise. This module imports only the
standard library, since the `axcore` command installs the handlers before it imports anything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers
HANDLED = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL_SECONDS = 1.0
"""A second signal within this time counts as the same one: `timeout` and some schedulers send each signal twice."""

_graceful = False
_requested: signal.Signals | None = None
_requested_at = 0.0


def install() -> None:
    """Installs the handlers. Call it again after code that replaces them, such as `jax.distributed.initialize`."""
    for number in HANDLED:
        signal.signal(number, _handle)


def stop_requested() -> signal.Signals | None:
    """The signal that requested a stop, or None. Set only inside `graceful`."""
    return _requested


@contextlib.contextmanager
def graceful() -> Iterator[None]:
    """While active, a signal does not end the process; `stop_requested` returns it.

    The caller must check `stop_requested` regularly and stop. A second signal kills the process. If the block ends
    without an exception after a signal, the signal then takes effect. Does nothing outside the main thread or inside
    another `graceful`.
    """
    global _graceful, _requested
    if _graceful or threading.current_thread() is not threading.main_thread():
        yield
        return
    with replaced(_handle):
        _graceful, _requested = True, None
        try:
            yield
        finally:
            requested, _graceful, _requested = _requested, False, None
    if requested is not None:
        signal.raise_signal(requested)


@contextlib.contextmanager
def default() -> Iterator[None]:
    """While active, both signals end the process without running Python code. Use it around blocking C calls."""
    with replaced(signal.SIG_DFL):
        yield


@contextlib.contextmanager
def replaced(handler: Handler) -> Iterator[None]:
    """Installs another handler for both signals while active."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    for number in HANDLED:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            if earlier is not None:  # None: a handler installed by C code, which Python cannot restore
                signal.signal(number, earlier)


def _handle(number: int, frame: FrameType | None) -> None:
    global _requested, _requested_at
    name, now = signal.Signals(number).name, time.monotonic()
    if not _graceful:
        _say(f"axcore: {name}: stopped; there was nothing to save")
        os._exit(128 + number)
    if _requested is None:
        _requested, _requested_at = signal.Signals(number), now
        _say(f"axcore: {name}: stopping after this step and saving; send it again to stop immediately")
    elif now - _requested_at > SAME_SIGNAL_SECONDS:
        _say(f"axcore: {name} again: stopped immediately; earlier checkpoints are unchanged")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
