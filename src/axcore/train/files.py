"""Atomic file writes, and readable messages for operating system errors."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

from axcore.config import AxcoreError, ConfigError

type Json = bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None
"""A value that JSON can hold."""


def os_reason(error: BaseException) -> str:
    """The message of the operating system, such as `No space left on device`; for other errors, the first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".splitlines()[0]


def expanded(path: str | os.PathLike[str], name: str) -> pathlib.Path:
    """A path with `~` replaced by the home directory.

    Raises:
        ConfigError: the path is empty, or its home directory is unknown. The message starts with `name`.
    """
    given = os.fspath(path)
    if not given or "\0" in given:
        raise ConfigError(f"{name}={given!r} is not a path. Give the path of a file or folder.")
    try:
        return pathlib.Path(given).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{name}={given!r} starts with a home directory that does not exist. Give an absolute path."
        ) from None


def new_folder(path: str | os.PathLike[str]) -> pathlib.Path:
    """The absolute path of a folder that is to be written.

    Raises:
        AxcoreError: it exists.
    """
    folder = expanded(path, "folder").absolute()
    if folder.exists():
        raise AxcoreError(f"{folder} already exists. Give another folder, or remove it.")
    return folder


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
