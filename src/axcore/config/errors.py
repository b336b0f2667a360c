"""Errors that a user can act on, and the spelling help they share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AxcoreError(Exception):
    """What the user asked for cannot be done. The message is complete: the command line prints it alone."""


class ConfigError(AxcoreError):
    """A config holds, or was asked to hold, something that it cannot. The message names the config path."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest known name, else `""`."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
