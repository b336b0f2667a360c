"""The list of a checkpoint's files with sizes and checksums, which shows damage before it is read.

TensorStore notices a file that is too short, but not a changed byte of an array. The list is complete before the
checkpoint is committed, so a committed checkpoint always has one.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO

from etils import epath

NAME = "inventory.json"
CHUNK_BYTES = 1 << 22
TEMPORARY = ".orbax-checkpoint-tmp"
"""Orbax's suffix of folders that are not committed."""
LATER = {NAME, "_CHECKPOINT_METADATA", "commit_success.txt"}
"""Files that Orbax changes after the list is written. Nothing is restored from them."""

Entries = Mapping[str, tuple[int, int]]
"""Path -> (size, CRC-32)."""


def of_process(folder: epath.Path, process: int) -> Entries:
    """The files below `folder` that a process wrote. Also makes them survive a power cut.

    Orbax names the files of a process after it; the first process wrote all others.
    """
    entries = {}
    for path in _files(folder):
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
        json.dump(entries, file)
        file.flush()
        if is_local(folder):
            os.fsync(file.fileno())


def read(folder: epath.Path) -> Entries:
    """The list.

    Raises:
        OSError, ValueError: it is missing or unreadable.
    """
    content = json.loads((folder / NAME).read_bytes())
    if not isinstance(content, dict):
        raise ValueError("not a list of files")
    return {name: (int(size), int(checksum)) for name, (size, checksum) in content.items()}


def damage(folder: epath.Path, entries: Entries, names: Iterable[str]) -> str | None:
    """The first thing that is wrong with these files, or None."""
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                size, checksum = _size_and_checksum(file)
        except FileNotFoundError:
            return f"{name} is missing"
        if size != entries[name][0]:
            return f"{name} has {size:,} bytes instead of {entries[name][0]:,}"
        if checksum != entries[name][1]:
            return f"{name} is not what was written: its checksum differs"
    return None


def is_local(path: epath.Path) -> bool:
    """Whether a path is in a file system, and not in an object store."""
    return "://" not in str(path)


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _size_and_checksum(file: BinaryIO) -> tuple[int, int]:
    size = checksum = 0
    while chunk := file.read(CHUNK_BYTES):
        size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum
