"""The list of a checkpoint's files with sizes and checksums, which shows damage before it is read.

TensorStore notices a file that is too short, but not a changed byte of an array. The list is complete before the
checkpoint is committed, so a committed checkpoint always has one.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from etils import epath

from axcore.train.files import os_reason

NAME = "inventory.json"
CHUNK_BYTES = 1 << 22
TEMPORARY = ".orbax-checkpoint-tmp"
"""Orbax's suffix of folders that are not committed."""
LATER = {NAME, "_CHECKPOINT_METADATA", "commit_success.txt"}
"""Files that Orbax changes after the list is written. Nothing is restored from them."""

Entries = Mapping[str, tuple[int, int]]
"""Path -> (size, CRC-32)."""


class Damage(Exception):
    """A file of a checkpoint is not what was written. The message names it."""


def of_process(folder: epath.Path, process: int) -> Entries:
    """The files below `folder` that a process wrote. Also makes them survive a power cut.

    Orbax names the files of a process after it; the first process wrote all others.
    """
    entries = {}
    for path in files(folder):
        name = path.relative_to(folder).as_posix().replace(TEMPORARY, "")
        writer = re.search(r"\bprocess_(\d+)(/|$)", name)
        if name not in LATER and (int(writer[1]) if writer else 0) == process:
            with path.open("rb") as file:
                entries[name] = _size_and_checksum(file)
                if is_local(folder):
                    os.fsync(file.fileno())
    return entries


def write(folder: epath.Path, entries: Entries) -> None:
    """Writes the list."""
    with (folder / NAME).open("w") as file:
        json.dump({"checksum": _of_list(entries), "files": entries}, file)
        file.flush()
        if is_local(folder):
            os.fsync(file.fileno())


def check(folder: epath.Path, only: str | None = None, part: tuple[int, int] = (0, 1)) -> None:
    """Reads the files of a checkpoint and compares them with the list.

    Args:
        only: the one file to read.
        part: (index, count): read every `count`-th file, from `index` on.

    Raises:
        Damage: the first difference.
        OSError: a file cannot be read.
    """
    try:
        content = json.loads((folder / NAME).read_bytes())
        entries = content["files"]
        if content["checksum"] != _of_list(entries):
            raise ValueError("its checksum differs")
        names = [only] if only else sorted(entries)[part[0] :: part[1]]
        expected = {name: tuple(entries[name]) for name in names}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Damage(f"{NAME}: {os_reason(error)}") from error
    for name, (size, checksum) in expected.items():
        try:
            with (folder / name).open("rb") as file:
                found = _size_and_checksum(file)
        except FileNotFoundError as error:
            raise Damage(f"{name} is missing") from error
        if found[0] != size:
            raise Damage(f"{name} has {found[0]:,} bytes instead of {size:,}")
        if found[1] != checksum:
            raise Damage(f"{name} is not what was written: its checksum differs")


def is_local(path: epath.Path) -> bool:
    """Whether a path is in a file system, and not in an object store."""
    return "://" not in str(path)


def files(folder: epath.Path) -> Iterator[epath.Path]:
    """All files below a folder."""
    for path in sorted(folder.iterdir()):
        yield from files(path) if path.is_dir() else (path,)


def _of_list(entries: Entries) -> int:
    return zlib.crc32(json.dumps(entries).encode())


def _size_and_checksum(file: BinaryIO) -> tuple[int, int]:
    size = checksum = 0
    while chunk := file.read(CHUNK_BYTES):
        size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum
