"""Silences Orbax while axcore calls it, since axcore raises Orbax's errors itself."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

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


def _install() -> None:
    global _added_handler, _previous_hook
    logging.getLogger("absl").addFilter(_is_shown)
    _added_handler = not logging.root.handlers and logging.lastResort is not None
    if _added_handler:  # absl calls logging.basicConfig() where the root logger has no handler
        logging.root.addHandler(logging.lastResort)  # type: ignore[arg-type]
    _previous_hook = sys.unraisablehook
    sys.unraisablehook = _report


def _uninstall() -> None:
    logging.getLogger("absl").removeFilter(_is_shown)
    if _added_handler:
        logging.root.removeHandler(logging.lastResort)  # type: ignore[arg-type]
    if sys.unraisablehook is _report:
        sys.unraisablehook = _previous_hook


def _is_shown(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname or logging.getLogger("axcore").isEnabledFor(logging.DEBUG)


def _report(unraisable: sys.UnraisableHookArgs) -> None:
    """Drops tracebacks about the event loop: after a failed write Orbax closes it, and every later write prints one."""
    if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != "Event loop is closed":
        _previous_hook(unraisable)
