"""Errors that name the plugin, or the callback, whose code raised them."""

from __future__ import annotations

import contextlib
import pathlib
import traceback
from collections.abc import Iterator

from axcore.config import AxcoreError, ConfigError
from axcore.plugin.states import PluginError

_HERE = str(pathlib.Path(__file__).parent)


def described(error: BaseException) -> str:
    """`ValueError: its text`."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


@contextlib.contextmanager
def attributed(owner: str, *passing: type[BaseException]) -> Iterator[None]:
    """Attributes the errors of the code inside to `owner`, such as `"callback early-stopping (axcore-x 0.3)"`.

    Other errors of axcore, Ctrl-C and `passing` pass unchanged.

    Raises:
        ConfigError: the code raised one. The message begins with `owner`.
        PluginError: the code raised one, or another exception, or tried to exit. The message begins with `owner`, and
            for another exception it has the file and the line.
    """
    through: tuple[type[BaseException], ...] = (AxcoreError, KeyboardInterrupt, GeneratorExit, *passing)
    try:
        yield
    except (ConfigError, PluginError) as error:
        kind = PluginError if isinstance(error, PluginError) else ConfigError
        raise kind(f"{owner}: {error}") from error
    except through:
        raise
    except BaseException as error:
        raise PluginError(f"{owner} failed{_place(error)}: {described(error)}") from error


def _place(error: BaseException) -> str:
    """`" at file:line"`: the innermost line of the owner's package, not of a library that it calls."""
    frames = [
        (str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_HERE)
    ]
    outside = [package for package, _, _ in frames if package != "axcore"]
    owned = [f" at {file}:{line}" for package, file, line in frames if package == (outside or ["axcore"])[0]]
    return owned[-1] if owned else ""
