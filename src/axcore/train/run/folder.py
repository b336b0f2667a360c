"""Creates and locks the run folder, and moves an earlier run aside."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
import warnings
from types import TracebackType
from typing import Self

from axcore.config import AxcoreError
from axcore.train.files import expanded, os_reason

if os.name == "posix":
    import fcntl


def create(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Creates the folder and its parents if they do not exist. Returns the absolute path.

    Raises:
        AxcoreError: the path is a file, or the folder is not writable. The message names the folder and the reason.
    """
    folder = expanded(folder, "out").absolute()
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except FileExistsError:
        raise AxcoreError(f"the run folder {folder} is a file. Give the path of a folder.") from None
    except OSError as error:
        raise AxcoreError(f"cannot write to the run folder {folder}: {os_reason(error)}") from error
    return folder


def move_aside(folder: pathlib.Path) -> pathlib.Path:
    """Renames the folder to the first free name among `NAME.1`, `NAME.2` and so on, and returns the new path.

    Raises:
        AxcoreError: the folder cannot be renamed.
    """
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    try:
        return folder.rename(aside)
    except OSError as error:
        raise AxcoreError(f"cannot move {folder} to {aside}: {os_reason(error)}") from error


class Lock:
    """Prevents two live processes from writing to the same run folder.

    ```python
    with Lock(folder):
        train()
    ```

    The operating system releases the lock when the process ends for any reason, so stale locks do not exist. Forked
    children do not hold it. On a file system without locks, it only warns.

    Raises:
        AxcoreError: another process holds the lock (the message names its host and pid), or the folder is not writable.
    """

    def __init__(self, folder: pathlib.Path):
        self.path = folder / ".lock"
        self._descriptor: int | None = None
        if os.name != "posix":
            warnings.warn(f"{folder} is not locked: this system has no flock", stacklevel=2)
            return
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise AxcoreError(f"cannot write to the run folder {folder}: {os_reason(error)}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise AxcoreError(
                    f"the run folder {folder} is in use by {holder or 'another process'}. Stop that run, or "
                    f"give this one another folder."
                ) from None
            warnings.warn(f"{folder} is not locked: {os_reason(error)}", stacklevel=2)
            return
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self._forget)
        with contextlib.suppress(OSError):  # on a full disk, the message of another process lacks the pid
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Releases the lock. Does nothing if it is already released."""
        self._forget()

    def _forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
