"""Errors that a user can act on, and suggestions for misspelled names."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence


class AxcoreError(Exception):
    """Base of all errors that a user can act on. The command line prints the message without a traceback.

    Attributes:
        exit_code: the exit code of the command; see `axcore.runtime.ExitCode`.
    """

    exit_code: int = 2


class ConfigError(AxcoreError):
    """A config is invalid, or an edit would make it invalid. The message names the config path."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest known name, or `""` if no name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


class MissingError(ConfigError):
    """A field is still REQUIRED. The message contains the path of the field as far as it is known."""

    def __init__(self, names: Sequence[str], kind: str, path: str = ""):
        self.names, self.kind, self.path = names, kind, path
        where = ", ".join(f"{path}.{name}" if path else name for name in names)
        options = ",".join(f"{name}=..." for name in names)
        super().__init__(
            f"{where} is REQUIRED ({kind}) but not set. Pass {options} to its Config, or set it on the command line "
            f"with NAME:{options} or --set"
        )

    def below(self, path: str) -> MissingError:
        """The same error with `path` prepended to its path."""
        return MissingError(self.names, self.kind, ".".join(part for part in (path, self.path) if part))


@contextlib.contextmanager
def under(path: str) -> Iterator[None]:
    """Prepends `path` to the path of a `MissingError` that the block raises."""
    try:
        yield
    except MissingError as error:
        raise error.below(path) from None
