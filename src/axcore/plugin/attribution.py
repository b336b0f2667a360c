"""Makes errors name the plugin or callback whose code raised them."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import traceback
from collections.abc import Iterator

from axcore.config import AxcoreError, ConfigError
from axcore.plugin.states import PluginError

_HERE = str(pathlib.Path(__file__).parent)


def described(error: BaseException) -> str:
    """The type and message of an error, as in `ValueError: bad shape`."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


@contextlib.contextmanager
def attributed(owner: str, *passing: type[BaseException]) -> Iterator[None]:
    """Puts `owner`, such as `"callback early-stopping (axcore-x 0.3)"`, in front of the errors that the block raises.

    Other axcore errors, Ctrl-C and the exceptions in `passing` are raised unchanged.

    Raises:
        ConfigError: the block raised a ConfigError.
        PluginError: the block raised a PluginError or SystemExit, or an exception that is not an axcore error. In the
            last two cases the message names the file and line.
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


_LIBRARIES = {"flax", "jax", "numpy", "optax", *sys.stdlib_module_names}


def _place(error: BaseException) -> str:
    """`" at file:line"`: the innermost line of the owner's package, not of a library that it calls or that calls it."""
    frames = [
        (str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_HERE)
    ]
    owner = next((package for package, _, _ in frames if package not in {"axcore", *_LIBRARIES}), "axcore")
    owned = [f" at {file}:{line}" for package, file, line in frames if package == owner]
    return owned[-1] if owned else ""
