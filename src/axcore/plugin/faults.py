"""Naming the plugin whose code has raised something."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from axcore.config import AxcoreError, ConfigError
from axcore.plugin.states import PluginError


def text_of(error: BaseException) -> str:
    """The text of an exception, also of one whose text raises."""
    try:
        return str(error)
    except BaseException:
        return "its text cannot be shown"


def described(error: BaseException) -> str:
    """`ValueError: what it says`."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


@contextlib.contextmanager
def blaming(what: str, *passing: type[BaseException]) -> Iterator[None]:
    """While code of a plugin runs: what it raises comes out as an error that begins with `what`, its cause chained.

    Args:
        passing: exceptions that are no fault and are let through, as are Ctrl-C and errors that are complete.

    Raises:
        ConfigError: it raised one.
        PluginError: it raised something that it does not mean the user to read, or tried to end the program.
    """
    through: tuple[type[BaseException], ...] = (AxcoreError, KeyboardInterrupt, GeneratorExit, *passing)
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
    except through:
        raise
    except BaseException as error:
        raise PluginError(f"{what} failed{_place(error)}: {described(error)}") from error


def _place(error: BaseException) -> str:
    """`" at file:line"`, where it was raised; `""` where that says nothing: it was raised by the call itself."""
    for frame in traceback.extract_tb(error.__traceback__, limit=-1):
        if Path(frame.filename).parent != Path(__file__).parent:
            return f" at {frame.filename}:{frame.lineno}"
    return ""
