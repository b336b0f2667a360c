"""Files that are never seen half-written, and what the operating system said when one could not be."""

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
    """What the operating system said, as in `No space left on device`; for any other error its first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".splitlines()[0]


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Puts `content` at `path` in one step: whoever reads sees the old file or the new one, also after a
    crash.

    Raises:
        AxcoreError: it could not be written; what was at `path` is still there.
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
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, content.encode())


def write_json(path: pathlib.Path, content: Json) -> None:
    """`write_bytes` of indented JSON. A non-finite float has no JSON form and is a ValueError."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sync_folder(folder: pathlib.Path) -> None:
    """Makes the names in a folder survive a power cut; a file system that cannot is left as it is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
