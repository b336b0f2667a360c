"""The inventory of a checkpoint: its files with sizes and checksums, which reveal damage before a restore.

TensorStore detects a truncated file but not a changed byte of an array. The inventory is written before the checkpoint
is committed, so every committed checkpoint has one.
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
"""Orbax's suffix for folders that are not committed."""
LATER = {NAME, "_CHECKPOINT_METADATA", "commit_success.txt"}
"""Files that Orbax changes after the inventory is written. A restore does not read them."""

Entries = Mapping[str, tuple[int, int]]
"""Path -> (size, CRC-32)."""


class CorruptFile(Exception):
    """A file of a checkpoint differs from what was written. The message names the file."""


def of_process(folder: epath.Path, process: int) -> Entries:
    """Returns the entries of the files below `folder` that a process wrote, after an fsync of each.

    Orbax puts the process number into the names of a process's files. The first process wrote all other files.
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
    """Writes the inventory."""
    with (folder / NAME).open("w") as file:
        json.dump({"checksum": _of_list(entries), "files": entries}, file)
        file.flush()
        if is_local(folder):
            os.fsync(file.fileno())


def check(folder: epath.Path, only: str | None = None, part: tuple[int, int] = (0, 1)) -> None:
    """Reads the files of a checkpoint and compares them with its inventory.

    Args:
        only: read only this file.
        part: (index, count): read every `count`-th file, starting at `index`.

    Raises:
        CorruptFile: the first difference.
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
        raise CorruptFile(f"{NAME}: {os_reason(error)}") from error
    for name, (size, checksum) in expected.items():
        try:
            with (folder / name).open("rb") as file:
                found = _size_and_checksum(file)
        except FileNotFoundError as error:
            raise CorruptFile(f"{name} is missing") from error
        if found[0] != size:
            raise CorruptFile(f"{name} has {found[0]:,} bytes, expected {size:,}")
        if found[1] != checksum:
            raise CorruptFile(f"{name} has changed since it was written: its checksum differs")


def is_local(path: epath.Path) -> bool:
    """Whether a path is in a file system rather than in an object store."""
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
