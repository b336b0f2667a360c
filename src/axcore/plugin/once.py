"""A value that a process makes once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from axcore.plugin.states import PluginError

PATIENCE_S = 20.0
"""How long a thread waits for another one that is making the value."""


class Once[T]:
    """Calls a function at its first use, and returns the same value ever after, in every thread.

    Nothing is kept of a call that raised.

    Raises:
        PluginError: it was called by what it is itself calling: that would go on for ever.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._made: tuple[T, ...] = ()
        self._lock = threading.Lock()
        self._maker: int | None = None

    def __call__(self) -> T:
        if self._made:
            return self._made[0]
        if self._maker == threading.get_ident():
            raise PluginError(
                "plugins are still being found; the module of a plugin must not call axcore.use, axcore.recipe or "
                "registry() while it is imported, nor in a hook: do it in a function that an offer names"
            )
        if not self._lock.acquire(timeout=PATIENCE_S):  # a plugin may wait at import for a thread that waits here
            raise PluginError(
                f"another thread has been looking for plugins for {PATIENCE_S:g} s; does one of them hang?"
            )
        try:
            if not self._made:
                self._maker = threading.get_ident()
                self._made = (self._make(),)
            return self._made[0]
        finally:
            self._maker = None
            self._lock.release()

    def cache_clear(self) -> None:
        """Forgets the value: for tests that change what is installed."""
        self._made = ()
