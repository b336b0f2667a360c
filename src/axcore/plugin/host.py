"""What a plugin may ask about the program and the machine that it is in."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import sys
from platform import machine, python_version


@dataclasses.dataclass(frozen=True)
class Host:
    """Given to every hook that has the argument `host`. It starts no backend and imports no jax.

    Attributes:
        api: the version of the plugin API.
        python: the version of the interpreter, as in `3.12.4`.
        platform: the operating system, as `sys.platform` says it: `linux`, `darwin`, `win32`.
        machine: the processor, as in `x86_64`, `aarch64`.
    """

    api: int
    python: str = python_version()
    platform: str = sys.platform
    machine: str = machine()

    @property
    def axcore(self) -> str:
        """The version of axcore, as in `0.1.0`."""
        return installed("axcore") or "unknown"

    def installed(self, distribution: str) -> str | None:
        """The version of an installed distribution, read from its metadata; None where it is not installed."""
        return installed(distribution)


@functools.cache
def installed(distribution: str) -> str | None:
    """The version of a distribution, looked up once in a process; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
