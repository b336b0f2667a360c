"""Silences Orbax while axcore calls it, since axcore raises Orbax's errors itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
from collections.abc import Iterator

_LOGGERS = ("absl", "asyncio")
_lock = threading.Lock()
_active = 0
_added_handler = False
_previous_hook = sys.unraisablehook


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops the log records and late tracebacks of Orbax while active. Other libraries are not affected. May be entered
    in one thread and left in another.

    Set the level of the logger `axcore` to DEBUG to see the messages of Orbax.
    """
    global _active
    with _lock:
        _active += 1
        if _active == 1:
            _install()
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if _active == 0:
                _uninstall()


def discard_late_errors() -> None:
    """Marks the errors of asyncio futures as handled if their event loop is closed.

    A failed save raises the error of the first write. Orbax does not ask for those of the other writes, which asyncio
    would log when the futures are collected, at any later time.
    """
    for each in gc.get_objects():
        is_future = issubclass(type(each), asyncio.Future)
        if is_future and each.get_loop().is_closed() and each.done() and not each.cancelled():
            each.exception()


def _install() -> None:
    global _added_handler, _previous_hook
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_shown)
    _added_handler = not logging.root.handlers and logging.lastResort is not None
    if _added_handler:  # absl calls logging.basicConfig() where the root logger has no handler
        logging.root.addHandler(logging.lastResort)  # type: ignore[arg-type]
    _previous_hook = sys.unraisablehook
    sys.unraisablehook = _report


def _uninstall() -> None:
    for name in _LOGGERS:
        logging.getLogger(name).removeFilter(_is_shown)
    if _added_handler:
        logging.root.removeHandler(logging.lastResort)  # type: ignore[arg-type]
    if sys.unraisablehook is _report:
        sys.unraisablehook = _previous_hook


def _is_shown(record: logging.LogRecord) -> bool:
    # The messages of asyncio name the file or the function of Orbax.
    source = record.getMessage() if record.name == "asyncio" else record.pathname
    return "orbax" not in source or logging.getLogger("axcore").isEnabledFor(logging.DEBUG)


def _report(unraisable: sys.UnraisableHookArgs) -> None:
    """Drops tracebacks about the event loop: after a failed write Orbax closes it, and every later write prints one."""
    if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != "Event loop is closed":
        _previous_hook(unraisable)
