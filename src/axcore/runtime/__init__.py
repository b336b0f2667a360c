"""The processes of a run: start, communication, signals and exit codes.

Names are imported on first use, so that the `axcore` command can import `axcore.runtime.signals` before anything else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axcore.runtime.cluster import Cluster as Cluster, detect as detect
    from axcore.runtime.errors import PeerFailed as PeerFailed, RuntimeTimeout as RuntimeTimeout
    from axcore.runtime.exit_codes import ExitCode as ExitCode
    from axcore.runtime.initialize import start as start
    from axcore.runtime.processes import (
        barrier as barrier,
        count as count,
        gather as gather,
        index as index,
        together as together,
    )
    from axcore.runtime.requests import Requests as Requests
    from axcore.runtime.watcher import leave as leave, watch as watch

_HOMES = {
    "cluster": "Cluster detect",
    "errors": "PeerFailed RuntimeTimeout",
    "exit_codes": "ExitCode",
    "processes": "barrier count gather index together",
    "requests": "Requests",
    "initialize": "start",
    "watcher": "leave watch",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'axcore.runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(f"axcore.runtime.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
