"""Limits what a plugin prints while it is loaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

LIMIT = 500
"""The number of characters that a plugin may print."""


class _Limited:
    """A stream that writes only the first `LIMIT` characters, until the plugin is loaded.

    A plugin may keep the stream, as the handlers of `logging` do.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.loaded = False
        self.written = 0

    def write(self, text: str) -> int:
        self._stream.write(text if self.loaded else text[: max(0, LIMIT - self.written)])
        self.written += len(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:  # Any: every other attribute is that of the stream
        return getattr(self._stream, name)


@contextlib.contextmanager
def limited(plugin: object) -> Iterator[None]:
    """Redirects stdout to stderr, so that output does not mix with that of a command such as `axcore plugins --json`.

    Prints the first `LIMIT` characters, and then the name of the plugin and the amount.
    """
    stream = _Limited(sys.stderr)
    with contextlib.redirect_stdout(cast(TextIO, stream)), contextlib.redirect_stderr(cast(TextIO, stream)):
        yield
    stream.loaded = True
    if stream.written > LIMIT:
        print(
            f"\naxcore: {plugin} printed {stream.written:,} characters at import, of which {LIMIT:,} are shown. "
            "Its module must not print; see axcore doctor",
            file=sys.stderr,
        )
