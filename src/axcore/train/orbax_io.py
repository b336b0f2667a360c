"""The part of Orbax that checkpoints use, kept quiet on the terminal: its errors are raised by axcore."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from axcore.train.run_folder import os_reason

RECORD = "record"
"""Item, and file in it, that holds all of a checkpoint but the arrays, as JSON."""
TEMPORARY = ".orbax-checkpoint-tmp"
"""Suffix of a checkpoint that is not committed."""
TIMEOUT_SECONDS = 24 * 3600
"""A slow disk is no error."""


def writer(complete: Callable[[], None]) -> Any:
    """Orbax's asynchronous checkpointer, which calls `complete` between the last file and the commit."""
    ocp = _orbax()
    options = ocp.options.AsyncOptions(
        timeout_secs=TIMEOUT_SECONDS,
        create_directories_asynchronously=False,  # so that an unwritable folder fails in `save` itself
        post_finalization_callback=complete,
    )
    return ocp.AsyncCheckpointer(_handler(), async_options=options)


def save_arguments(arrays: Mapping[str, jax.Array], record: Mapping[str, Any]) -> Any:
    """What the writer's `save` takes as `args`."""
    args = _orbax().args
    return args.Composite(state=args.PyTreeSave(dict(arrays)), record=args.JsonSave(record))


def read(folder: pathlib.Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The named arrays of a checkpoint, each placed as its ShapeDtypeStruct says."""
    if not abstract:
        return {}
    ocp = _orbax()
    restore_args = ocp.checkpoint_utils.construct_restore_args(dict(abstract))
    state = ocp.args.PyTreeRestore(item=dict(abstract), restore_args=restore_args, partial_restore=True)
    with ocp.Checkpointer(_handler()) as reader:
        return reader.restore(folder, args=ocp.args.Composite(state=state))["state"]


def reason(error: BaseException) -> str:
    """What the operating system said, also where TensorStore put it into a message of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        code = re.search(r"os_error_code='(\d+)'|OS error (\d+)", str(cause))
        if code:
            return os.strerror(int(code[1] or code[2]))
        cause = cause.__cause__ or cause.__context__
    return os_reason(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is the memory that failed, of the host or of a device, and not the disk."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED: Out of memory" in str(error)


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


def _unless_late(hook: Callable[[Any], object], report: Any) -> None:
    """When one write fails, Orbax stops listening, and TensorStore's threads print a traceback for each other
    write that ends after it. The failure itself is raised as it should be."""
    if report.exc_type is not RuntimeError or str(report.exc_value) != "Event loop is closed":
        hook(report)


def _handler() -> Any:
    ocp = _orbax()
    return ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler(), record=ocp.JsonCheckpointHandler(RECORD))
