"""Errors that a user can act on, and the spelling help they share."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence


class AxcoreError(Exception):
    """What the user asked for cannot be done. The message is complete: the command line prints it alone.

    Attributes:
        exit_code: of a command that it ends; see `axcore.runtime.ExitCode`. A usage error by default.
    """

    exit_code: int = 2


class ConfigError(AxcoreError):
    """A config holds, or was asked to hold, something that it cannot. The message names the config path."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest known name, else `""`."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


class MissingError(ConfigError):
    """A field is still REQUIRED. The message names it by its path, as far as that is known."""

    def __init__(self, names: Sequence[str], kind: str, path: str = ""):
        self.names, self.kind, self.path = names, kind, path
        where = ", ".join(f"{path}.{name}" if path else name for name in names)
        super().__init__(f"{where} is REQUIRED ({kind}), and nobody set it")

    def below(self, path: str) -> MissingError:
        """The same error, seen from a node that holds this one at `path`."""
        return MissingError(self.names, self.kind, ".".join(part for part in (path, self.path) if part))


@contextlib.contextmanager
def under(path: str) -> Iterator[None]:
    """While a node below `path` is built: names what it lacks from here."""
    try:
        yield
    except MissingError as error:
        raise error.below(path) from None
