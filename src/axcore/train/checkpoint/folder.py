"""The folder of checkpoints: a subfolder for each step, and what interrupted saves and removals left."""

from __future__ import annotations

import pathlib
import shutil
import time

from axcore.config import AxcoreError
from axcore.train.checkpoint import inventory
from axcore.train.files import os_reason, sync_folder

TEMPORARY = ".tmp"
"""Suffix of a checkpoint that is not committed."""
DOOMED = "removing-"
"""Prefix of a checkpoint that is being removed."""
CLEARING_ATTEMPTS = 10


def steps(folder: pathlib.Path) -> list[int]:
    """The steps that are committed, oldest first; none when there is no folder."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise AxcoreError(f"cannot list the checkpoints in {folder}: {os_reason(error)}") from error
    return sorted(int(name) for name in names if name.isdecimal())


def commit(partial: pathlib.Path, target: pathlib.Path, *, checksums: bool) -> None:
    """Makes a checkpoint out of a folder that is complete, also for after a power cut."""
    inventory.write(partial, checksums=checksums)
    partial.rename(target)
    sync_folder(target.parent)


def remove(folder: pathlib.Path, step: int) -> None:
    """Removes a checkpoint, in two moves: it takes a while, and half a checkpoint must not count as one."""
    target, doomed = folder / str(step), folder / f"{DOOMED}{step}"
    try:
        target.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise AxcoreError(f"cannot remove the checkpoint {target}: {os_reason(error)}") from error


def clear_leftovers(folder: pathlib.Path) -> None:
    """Removes what interrupted saves and removals left, as far as it can. For the process that saves."""
    for _ in range(CLEARING_ATTEMPTS):
        found = [*folder.glob(f"*{TEMPORARY}*"), *folder.glob(f"{DOOMED}*")]
        if not found:
            break
        for leftover in found:
            shutil.rmtree(leftover, ignore_errors=True)
        time.sleep(0.05)  # other writes of a save that failed may go on for a moment, and make its folder anew
