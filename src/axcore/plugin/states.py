"""A plugin, and what can become of one."""

from __future__ import annotations

import enum
import functools
import importlib.metadata
from collections.abc import Iterable
from email.message import Message
from typing import Any

from axcore.config import AxcoreError
from axcore.plugin.host import installed
from axcore.plugin.offers import Offer

CORE = "core"
"""The id of the plugin through which the core makes its own offers."""
CORE_MODULE = "axcore.core_plugin"


class PluginError(AxcoreError):
    """A plugin is missing, broken, or in conflict with another; the message says what to do."""


class Unavailable(Exception):
    """Raised by a plugin module at import when it cannot serve on this machine. Say why."""


class State(enum.StrEnum):
    """What became of a plugin."""

    DISCOVERED = "discovered"
    """Its entry point is known; its module was not imported yet."""
    DISABLED = "disabled"
    """AXCORE_DISABLE, AXCORE_PLUGINS or AXCORE_ALLOWLIST keeps it out."""
    INCOMPATIBLE = "incompatible"
    """It needs another version of the plugin API."""
    UNAVAILABLE = "unavailable"
    """It said itself that it cannot run here, by raising `Unavailable` at import."""
    LOADED = "loaded"
    """Its hooks were called and its offers can be used."""
    FAILED = "failed"
    """It raised, or does not keep to the hook specs; the traceback is kept."""


class Plugin:
    """One installed plugin.

    Attributes:
        id: the entry point's name, its one id everywhere.
        module: the module that the entry point names.
        state: what became of it.
        detail: why it is in this state, where that is not plain: a reason, or a traceback.
        offers: what it offers, once it is loaded.
        warnings: what it does that a later version of axcore will refuse.
        api: the version of the plugin API that it states; None where it states none or was not imported.
    """

    def __init__(self, point: importlib.metadata.EntryPoint, id: str = ""):
        self.id = id or point.name
        self.module = point.value.partition(":")[0].strip()
        self.point = point
        self.state = State.DISCOVERED
        self.detail = ""
        self.offers: tuple[Offer, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self.api: Any = None

    # Read when they are asked for: the metadata of fifty distributions takes longer than finding their plugins.

    @functools.cached_property
    def metadata(self) -> Message | None:
        """The metadata of its distribution; None where it has none."""
        return self.point.dist.metadata if self.point.dist else None  # type: ignore[return-value]

    @functools.cached_property
    def distribution(self) -> str:
        """What was installed, by the name that pip knows."""
        return (self.metadata and self.metadata.get("Name")) or ("axcore" if self.id == CORE else "unknown")

    @functools.cached_property
    def version(self) -> str:
        return (self.metadata and self.metadata.get("Version")) or installed(self.distribution) or "?"

    @property
    def homepage(self) -> str | None:
        """The page that its distribution names as its own, if any."""
        if self.metadata is None:
            return None
        urls = [entry.partition(",") for entry in self.metadata.get_all("Project-URL") or ()]
        named = {label.strip().lower(): url.strip() for label, _, url in urls}
        return self.metadata.get("Home-page") or named.get("homepage") or named.get("repository")

    @property
    def package(self) -> str:
        """The package that holds its module: what is below it is the plugin's."""
        return self.module.rpartition(".")[0] or self.module

    @property
    def reason(self) -> str:
        """The last line of `detail`."""
        return self.detail.strip().splitlines()[-1] if self.detail.strip() else ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def __repr__(self) -> str:
        return f"Plugin({self.id!r}, {self.state})"


def ways_out(plugins: Iterable[Plugin]) -> str:
    """What to set to keep one of these plugins out; the core cannot be kept out."""
    ids = dict.fromkeys(plugin.id for plugin in plugins if plugin.id != CORE)
    return " or ".join(f"AXCORE_DISABLE={id}" for id in ids)
