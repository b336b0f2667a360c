"""Discovery: which plugins are installed, what state each is in, and what they offer."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Iterable, Mapping
from typing import Any

from axcore.plugin.controls import Controls
from axcore.plugin.hooks import API_VERSION, FAMILIES
from axcore.plugin.host import Host
from axcore.plugin.loading import Manager, load
from axcore.plugin.offers import Offer
from axcore.plugin.once import Once
from axcore.plugin.states import CORE, CORE_MODULE, Plugin, PluginError, State

GROUP = "axcore.plugins"
CORE_POINT = importlib.metadata.EntryPoint(CORE, CORE_MODULE, GROUP)
"""The core's own, for a copy of axcore that no installer has written entry points for."""


class Registry:
    """The plugins of one process. `registry()` is the one that everything uses.

    Args:
        entry_points: those of the group `axcore.plugins`, in any order.
        environ: holds AXCORE_DISABLE, AXCORE_PLUGINS, AXCORE_ALLOWLIST and AXCORE_STRICT, where they are set.
        families: the classes that hold the hook specs.
        arguments: values for arguments of hooks beside `host`, by name.

    Raises:
        PluginError: a variable cannot be obeyed, or AXCORE_STRICT is set and something is wrong with a plugin.
    """

    def __init__(
        self,
        entry_points: Iterable[importlib.metadata.EntryPoint],
        environ: Mapping[str, str],
        *,
        families: Iterable[type] = FAMILIES,
        arguments: Mapping[str, Any] | None = None,
    ):
        self.plugins: dict[str, Plugin] = {}
        self._claims: dict[tuple[type[Offer], str], list[Plugin]] = {}
        self._owners: dict[str, Plugin | None] = {}
        for point in sorted(entry_points, key=lambda point: (point.name, point.value)):
            self._note(point)
        self.controls = Controls.of(environ, self.plugins)
        manager = Manager(families)
        given = {"host": Host(API_VERSION), **(arguments or {})}
        for plugin in self.plugins.values():
            reason = self.controls.why_disabled(plugin)
            if reason:
                plugin.state, plugin.detail = State.DISABLED, reason
            elif plugin.state is State.DISCOVERED:
                load(plugin, manager, given)
                for offer in plugin.offers:
                    self._claims.setdefault((type(offer), offer.name), []).append(plugin)
        if self.controls.strict:
            self._refuse_faults()

    def find[T: Offer](self, kind: type[T], name: str) -> tuple[Plugin, T] | None:
        """The offer of this kind and name, with the plugin that makes it; None when nobody does.

        Raises:
            PluginError: two plugins claim the name.
        """
        claims = self._claims.get((kind, name), [])
        if len(claims) > 1:
            raise PluginError(_conflict(kind, name, claims))
        return next(((plugin, offer) for plugin, offer in self.offers(kind) if offer.name == name), None)

    def offers[T: Offer](self, kind: type[T]) -> list[tuple[Plugin, T]]:
        """Every offer of a kind, by plugin id."""
        return [(plugin, offer) for plugin in self.plugins.values() for offer in plugin.offers if type(offer) is kind]

    def conflicts(self) -> list[str]:
        """A sentence about every name that two plugins offer as the same kind of thing."""
        return [_conflict(kind, name, claims) for (kind, name), claims in self._claims.items() if len(claims) > 1]

    def faults(self) -> list[str]:
        """A sentence about everything that AXCORE_STRICT refuses: broken and incompatible plugins, and conflicts."""
        bad = [plugin for plugin in self.plugins.values() if plugin.state in (State.FAILED, State.INCOMPATIBLE)]
        told = [f"plugin {plugin.id!r} ({plugin}) is {plugin.state}: {plugin.reason}" for plugin in bad]
        return [*told, *self.conflicts()]

    def why_missing(self, name: str) -> str:
        """What is known of a plugin that could have offered `name` but does not; `""` when nothing is."""
        for plugin in self.plugins.values():
            is_it = name in (plugin.id, plugin.distribution, plugin.distribution.removeprefix("axcore-"))
            if is_it and plugin.state is not State.LOADED:
                return f"plugin {plugin.id!r} ({plugin}) is installed but {plugin.state}: {plugin.reason}"
        return ""

    def not_loaded(self) -> str:
        """`" Not loaded: ..."` with each plugin that might offer something and does not, and why; `""` without any."""
        absent = [plugin for plugin in self.plugins.values() if plugin.state is not State.LOADED]
        if not absent:
            return ""
        told = [f"{plugin.id} ({plugin}, {plugin.state}: {plugin.reason})" for plugin in absent[:5]]
        more = f" and {len(absent) - 5} more, see axcore plugins" if len(absent) > 5 else ""
        return f" Not loaded: {', '.join(told)}{more}"

    def owner(self, module: str) -> Plugin | None:
        """The plugin whose package holds a module; None for the core's own modules and for user code."""
        if module not in self._owners:
            plugins = (plugin for plugin in self.plugins.values() if plugin.id != CORE)
            inside = [plugin for plugin in plugins if f"{module}.".startswith(f"{plugin.package}.")]
            self._owners[module] = max(inside, key=lambda plugin: len(plugin.package), default=None)
        return self._owners[module]

    def _note(self, point: importlib.metadata.EntryPoint) -> None:
        new, known = Plugin(point), self.plugins.get(point.name)
        if new.id == CORE and new.module != CORE_MODULE:
            new = Plugin(point, id=f"{CORE} of {new.distribution}")
            new.state, new.detail = State.FAILED, f"the id {CORE!r} is the core's own; name the entry point differently"
            self.plugins[new.id] = new
        elif known is None:
            self.plugins[new.id] = new
        elif new.id != CORE and (known.module, known.distribution) != (new.module, new.distribution):
            # The same twice is an editable install that left its metadata in two places.
            known.state = State.FAILED
            known.detail = f"two distributions claim the id {point.name!r}: {known} and {new}; uninstall one"

    def _refuse_faults(self) -> None:
        faults = self.faults()
        if faults:
            raise PluginError("\n- ".join(["AXCORE_STRICT=1 refuses these plugins as they are:", *faults]))


def _conflict(kind: type[Offer], name: str, claims: list[Plugin]) -> str:
    names = " and ".join(f"{plugin.id} ({plugin})" for plugin in claims)
    other = next(plugin.id for plugin in claims if plugin.id != CORE)
    return f"the {kind.kind} {name!r} is offered by {names}; uninstall one, or AXCORE_DISABLE={other}"


def _discover() -> Registry:
    points = [*importlib.metadata.entry_points(group=GROUP)]
    if not any(point.name == CORE and point.value == CORE_MODULE for point in points):
        points.append(CORE_POINT)
    return Registry(points, os.environ)


registry = Once(_discover)
"""`registry()`: the plugins of this process, found once, at first use."""


def resolve(plugin: Plugin, offer: Offer) -> Any:
    """Imports what an offer names.

    Raises:
        PluginError: the import failed, with its cause chained.
    """
    module, _, attribute = offer.target.partition(":")
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        if not callable(found):
            raise TypeError(f"it is {found!r}, which cannot be called")
        return found
    except Exception as error:
        raise PluginError(
            f"the {offer.kind} {offer.name!r} of {plugin} could not be loaded from {offer.target!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
