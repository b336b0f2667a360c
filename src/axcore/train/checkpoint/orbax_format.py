"""Orbax as a checkpoint format, kept quiet on the terminal: its errors are raised by axcore."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from axcore.train.checkpoint.format import CheckpointFormat

TIMEOUT_SECONDS = 24 * 3600
"""A slow disk is no error."""


class OrbaxFormat(CheckpointFormat):
    """Orbax's PyTree folders, written in the background, by every process its own shards."""

    class Config(CheckpointFormat.Config):
        """No fields."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._writer: Any = None

    def save(self, folder: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
        ocp = _orbax()
        with _plain_errors():
            if self._writer is None:
                options = ocp.options.AsyncOptions(
                    timeout_secs=TIMEOUT_SECONDS,
                    create_directories_asynchronously=False,  # so that an unwritable folder fails here
                )
                self._writer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)
            self._writer.save(folder, args=ocp.args.PyTreeSave(dict(arrays)))

    def wait(self) -> None:
        if self._writer is not None:
            with _plain_errors():
                self._writer.wait_until_finished()

    def restore(self, folder: pathlib.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        if not wanted:
            return {}
        ocp = _orbax()
        item = dict(wanted)
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        with _plain_errors(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(folder, args=args)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises what the operating system said, also where TensorStore put it into a message of its own."""
    try:
        yield
    except Exception as error:
        plain = _os_error(error)
        if plain is None or plain is error:
            raise
        raise plain from error


def _os_error(error: BaseException | None) -> OSError | None:
    """The nearest cause that the operating system knows by number."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error
        if code := re.search(r"os_error_code='(\d+)'|OS error (\d+)", str(error)):
            number = int(code[1] or code[2])
            return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


def _orbax() -> Any:
    import orbax.checkpoint  # here, since it takes a second

    absl = logging.getLogger("absl")
    if _not_from_orbax not in absl.filters:
        absl.addFilter(_not_from_orbax)
        warnings.filterwarnings("ignore", module=r"orbax\.")
        sys.unraisablehook = functools.partial(_unless_late, sys.unraisablehook)
    return orbax.checkpoint


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Set the level of the logger `axcore` to DEBUG to see what Orbax says."""
    return "orbax" not in record.pathname or logging.getLogger("axcore").isEnabledFor(logging.DEBUG)


def _unless_late(hook: Any, report: Any) -> None:
    """When one write fails, Orbax stops listening, and TensorStore's threads print a traceback for each other
    write that ends after it. The failure itself is raised as it should be."""
    if report.exc_type is not RuntimeError or str(report.exc_value) != "Event loop is closed":
        hook(report)
