"""Atomic file writes, and readable reasons for errors of the operating system."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

from axcore.config import AxcoreError

type Json = bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None
"""A value that JSON can hold."""


def os_reason(error: BaseException) -> str:
    """The message of the operating system, such as `No space left on device`; for other errors, the first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".splitlines()[0]


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Writes a file atomically: a reader sees the old contents or the new ones, even after a crash.

    Raises:
        AxcoreError: the file cannot be written. The old file remains.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise AxcoreError(f"cannot write {path}: {os_reason(error)}") from error


def write_text(path: pathlib.Path, content: str) -> None:
    """Writes UTF-8 text like `write_bytes`."""
    write_bytes(path, content.encode())


def write_json(path: pathlib.Path, content: Json) -> None:
    """Writes indented JSON like `write_bytes`. NaN and the infinities, which JSON lacks, become strings: `"NaN"`."""
    finite = json.loads(json.dumps(content), parse_constant=str)
    write_text(path, json.dumps(finite, indent=2, ensure_ascii=False) + "\n")


def sync_folder(folder: pathlib.Path) -> None:
    """Syncs the entries of a folder to disk, on file systems that support it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
