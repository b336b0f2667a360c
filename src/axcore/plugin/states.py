"""A plugin and the states it can be in."""

from __future__ import annotations

import enum
import functools
import importlib.metadata
from collections.abc import Iterable
from email.message import Message

from axcore.config import AxcoreError
from axcore.plugin.host import installed
from axcore.plugin.offers import Offer

CORE = "core"
"""The id of the plugin that makes the built-in offers."""
CORE_MODULE = "axcore.core_plugin"


class PluginError(AxcoreError):
    """A plugin is missing or broken, or conflicts with another. The message says what to do."""


class Unavailable(Exception):
    """A plugin module raises this at import if it cannot work on this machine. The text gives the reason."""


class State(enum.StrEnum):
    """The state of a plugin."""

    DISCOVERED = "discovered"  # the entry point is known; the module is not imported yet
    DISABLED = "disabled"  # AXCORE_DISABLE, AXCORE_PLUGINS or AXCORE_ALLOWLIST excludes it
    INCOMPATIBLE = "incompatible"  # it requires another version of the plugin API
    UNAVAILABLE = "unavailable"  # it raised `Unavailable` at import
    LOADED = "loaded"  # its hooks were called, and its offers can be used
    FAILED = "failed"  # it raised an error, does not match the hook specifications, or shares its id with another


class Plugin:
    """One installed plugin.

    Attributes:
        id: the name of the entry point, which identifies the plugin everywhere.
        module: the module that the entry point names.
        detail: the reason for the state, or a traceback.
        offers: what it offers, once it is loaded.
        api: the version of the plugin API that the module declares, if any.
    """

    def __init__(self, point: importlib.metadata.EntryPoint):
        self.id = point.name
        self.module = point.value
        self.point = point
        self.state = State.DISCOVERED
        self.detail = ""
        self.offers: tuple[Offer, ...] = ()
        self.api: int | None = None

    # Metadata is read on demand, because reading it for fifty distributions takes longer than finding their plugins.

    @functools.cached_property
    def metadata(self) -> Message:
        """The metadata of its distribution; empty if there is none."""
        return self.point.dist.metadata if self.point.dist else Message()  # type: ignore[return-value]

    @functools.cached_property
    def distribution(self) -> str:
        """The name of its distribution."""
        return self.metadata.get("Name") or ("axcore" if self.id == CORE else "unknown")

    @functools.cached_property
    def version(self) -> str:
        return self.metadata.get("Version") or installed(self.distribution) or "?"

    @property
    def package(self) -> str:
        """The package that contains its module."""
        return self.module.rpartition(".")[0] or self.module

    @property
    def reason(self) -> str:
        """The last line of `detail`."""
        return self.detail.strip().rpartition("\n")[2]

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def how_to_disable(plugins: Iterable[Plugin]) -> str:
    """The settings of AXCORE_DISABLE that exclude these plugins, as text. The core cannot be excluded."""
    ids = dict.fromkeys(plugin.id for plugin in plugins if plugin.id != CORE)
    return " or ".join(f"AXCORE_DISABLE={id}" for id in ids)
