"""Discovery: which plugins are installed, what state each is in, and what they offer."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from axcore.plugin.controls import Controls
from axcore.plugin.entry_points import installed_points
from axcore.plugin.faults import described
from axcore.plugin.hooks import API_VERSION, FAMILIES
from axcore.plugin.host import Host
from axcore.plugin.loading import NAME, Manager, load
from axcore.plugin.offers import Offer
from axcore.plugin.once import Once
from axcore.plugin.ownership import claims, owner
from axcore.plugin.states import CORE, CORE_MODULE, Plugin, PluginError, State, ways_out


class Registry:
    """The plugins of one process. `registry()` is the one that everything uses.

    Args:
        entry_points: those of the group `axcore.plugins`, in any order.
        environ: holds AXCORE_DISABLE, AXCORE_PLUGINS, AXCORE_ALLOWLIST and AXCORE_STRICT, where they are set.
        families: the classes that hold the hook specs.
        arguments: values for arguments of hooks beside `host`, by name.
        unreadable: plugins that have failed already.

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
        unreadable: Iterable[Plugin] = (),
    ):
        self.plugins: dict[str, Plugin] = {}
        self._claims: dict[tuple[type[Offer], str], list[Plugin]] = {}
        self._owners: dict[str, Plugin | None] = {}
        for point in sorted(entry_points, key=lambda point: (point.name, point.value)):
            self._note(point)
        for plugin in unreadable:
            self.plugins.setdefault(plugin.id, plugin)
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

    def advice(self, id: str) -> str:
        """How to get what one of axcore's own plugins brings."""
        return self.why_missing(id) or f"pip install axcore-{id}"

    def not_loaded(self) -> str:
        """A line about each plugin that might offer something and does not, each after a line break."""
        absent = [plugin for plugin in self.plugins.values() if plugin.state is not State.LOADED]
        told = [f"\n  not loaded: {plugin.id} ({plugin}, {plugin.state}: {plugin.reason})" for plugin in absent[:5]]
        more = f"\n  and {len(absent) - 5} more, see axcore plugins" if len(absent) > 5 else ""
        return "".join(told) + more

    def owner(self, module: str) -> Plugin | None:
        """The plugin that a module belongs to; None for the core's own modules and for user code."""
        if module not in self._owners:
            self._owners[module] = owner(module, self._claimed)
        return self._owners[module]

    @functools.cached_property
    def _claimed(self) -> dict[str, list[Plugin]]:
        return claims(self.plugins.values())

    def _note(self, point: importlib.metadata.EntryPoint) -> None:
        new, known = Plugin(point), self.plugins.get(point.name)
        if new.id == CORE and new.module != CORE_MODULE:
            new = Plugin(point, id=f"{CORE} of {new.distribution}")
            new.state, new.detail = State.FAILED, f"the id {CORE!r} is the core's own; name the entry point differently"
            self.plugins[new.id] = new
        elif known is None:
            self.plugins[new.id] = new
            if not NAME.fullmatch(new.id):
                new.state, new.detail = State.FAILED, f"the id {new.id!r} must be letters, digits, '.', '_' and '-'"
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
    return f"the {kind.kind} {name!r} is offered by {names}; uninstall one, or {ways_out(claims)}"


def _discover() -> Registry:
    points, unreadable = installed_points()
    return Registry(points, os.environ, unreadable=unreadable)


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
            raise TypeError(f"it is {reprlib.repr(found)}, which cannot be called")
        return found
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(
            f"the {offer.kind} {offer.name!r} of {plugin} could not be loaded from {offer.target!r}: {described(error)}"
        ) from error
