"""Information for hooks about the installation and the machine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from platform import machine, python_version


def installed(distribution: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclasses.dataclass(frozen=True)
class Host:
    """The argument `host` of every hook. Does not import jax or start a backend."""

    api: int  # the version of the plugin API
    python: str = python_version()  # of the interpreter, such as `3.12.4`
    platform: str = sys.platform  # the operating system: `linux`, `darwin`, `win32`
    machine: str = machine()  # the processor, such as `x86_64` or `aarch64`
    installed = staticmethod(installed)

    @property
    def axcore(self) -> str:
        """The version of axcore, such as `0.1.0`."""
        return installed("axcore") or "unknown"
