"""Discovery: which plugins are installed, the state of each, and what they offer."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from axcore.config import Config, walk
from axcore.plugin.attribution import described
from axcore.plugin.controls import Controls
from axcore.plugin.loading import load
from axcore.plugin.offers import Offer
from axcore.plugin.output import limited
from axcore.plugin.states import CORE, CORE_MODULE, Plugin, PluginError, State, how_to_disable

GROUP = "axcore.plugins"
CORE_POINT = EntryPoint(CORE, CORE_MODULE, GROUP)
"""Replaces the entry point of the core if axcore is imported from a source tree that is not installed."""


def load_all(plugins: Iterable[Plugin]) -> None:
    """Imports the modules of plugins and calls their hooks. Prints at most the first lines of their output."""
    for plugin in plugins:
        with limited(plugin):
            load(plugin)


class Registry:
    """The plugins of one process. `registry()` returns the registry that axcore uses.

    Args:
        points: the entry points of the group `axcore.plugins`, in any order.
        environ: may contain AXCORE_DISABLE, AXCORE_PLUGINS, AXCORE_ALLOWLIST and AXCORE_STRICT.
        load: loads plugins that no variable excludes; `axcore doctor` loads them in other processes.

    Raises:
        PluginError: a variable is invalid, or AXCORE_STRICT=1 and a plugin is broken or conflicts with another.
    """

    def __init__(
        self,
        points: Iterable[EntryPoint],
        environ: Mapping[str, str],
        load: Callable[[Iterable[Plugin]], None] = load_all,
    ):
        self.plugins: dict[str, Plugin] = {}
        for point in sorted(points, key=lambda point: (point.name, point.value)):
            self._add(point)
        self.controls = Controls(environ, self.plugins)
        for plugin in self.plugins.values():
            if reason := self.controls.why_disabled(plugin):
                plugin.state, plugin.detail = State.DISABLED, reason
        load([plugin for plugin in self.plugins.values() if plugin.state is State.DISCOVERED])
        if self.controls.strict and (faults := self._faults()):
            raise PluginError("\n- ".join(["AXCORE_STRICT=1 does not allow these plugins:", *faults]))

    def _add(self, point: EntryPoint) -> None:
        new, known = Plugin(point), self.plugins.get(point.name)
        if known is None:
            self.plugins[new.id] = new
        elif (known.module, known.distribution) != (new.module, new.distribution):
            # An editable install may have its metadata in two places, which gives the same entry point twice.
            known.state = State.FAILED
            known.detail = f"two distributions claim the id {point.name!r}: {known} and {new}; uninstall one"

    def offers[T: Offer](self, kind: type[T]) -> list[tuple[Plugin, T]]:
        """Every offer of a kind, with its plugin."""
        return [(plugin, offer) for plugin in self.plugins.values() for offer in plugin.offers if type(offer) is kind]

    def find[T: Offer](self, kind: type[T], name: str) -> tuple[Plugin, T] | None:
        """The offer of this kind and name, with its plugin; None if there is none.

        Raises:
            PluginError: several plugins offer it.
        """
        found = [(plugin, offer) for plugin, offer in self.offers(kind) if offer.name == name]
        if len(found) > 1:
            raise PluginError(self._conflict(kind, name))
        return found[0] if found else None

    def conflicts(self) -> list[str]:
        """An error message for each name that several plugins offer as the same kind."""
        claims = [(type(offer), offer.name) for plugin in self.plugins.values() for offer in plugin.offers]
        return [self._conflict(*claim) for claim in dict.fromkeys(claims) if claims.count(claim) > 1]

    def _conflict(self, kind: type[Offer], name: str) -> str:
        plugins = [plugin for plugin, offer in self.offers(kind) if offer.name == name]
        listed = " and ".join(f"{plugin.id} ({plugin})" for plugin in plugins)
        return f"the {kind.kind} {name!r} is offered by {listed}; uninstall one, or set {how_to_disable(plugins)}"

    def _faults(self) -> list[str]:
        """An error message for each broken plugin and each conflict."""
        bad = [plugin for plugin in self.plugins.values() if plugin.state in (State.FAILED, State.INCOMPATIBLE)]
        return [f"plugin {each.id!r} ({each}) is {each.state}: {each.reason}" for each in bad] + self.conflicts()

    def why_missing(self, name: str) -> str:
        """Why a plugin of this name is installed but not loaded; `""` if there is none."""
        for plugin in self.plugins.values():
            names = (plugin.id, plugin.distribution, plugin.distribution.removeprefix("axcore-"))
            if name in names and plugin.state is not State.LOADED:
                return f"plugin {plugin.id!r} ({plugin}) is installed but {plugin.state}: {plugin.reason}"
        return ""

    def advice(self, id: str) -> str:
        """How to get one of axcore's own plugins."""
        return self.why_missing(id) or f"pip install axcore-{id}"

    def not_loaded(self) -> str:
        """A line for each plugin that is not loaded, each preceded by a line break."""
        absent = [plugin for plugin in self.plugins.values() if plugin.state is not State.LOADED]
        told = [f"\n  not loaded: {plugin.id} ({plugin}, {plugin.state}: {plugin.reason})" for plugin in absent[:5]]
        return "".join(told) + (f"\n  and {len(absent) - 5} more, see axcore plugins" if len(absent) > 5 else "")

    def owner(self, module: str) -> Plugin | None:
        """The plugin that a module belongs to; None for the core, user code and modules that distributions share.

        A plugin owns its module, the modules of its targets, and the packages that contain them.
        """
        while module and module not in self._claims:
            module = module.rpartition(".")[0]
        claims = self._claims.get(module, [])
        return claims[0] if len({plugin.distribution for plugin in claims}) == 1 else None

    @functools.cached_property
    def _claims(self) -> dict[str, list[Plugin]]:
        found: dict[str, list[Plugin]] = {}
        for plugin in self.plugins.values():
            if plugin.id != CORE:
                for name in set(self._claimed_by(plugin)) - {""}:
                    found.setdefault(name, []).append(plugin)
        return found

    def _claimed_by(self, plugin: Plugin) -> Iterator[str]:
        yield from (plugin.module, plugin.package)
        others = ["axcore", *(other.package for other in self.plugins.values() if other is not plugin)]
        for offer in plugin.offers:
            module = offer.target.partition(":")[0]
            if _is_in(module, plugin.package) or not any(_is_in(module, package) for package in others):
                yield from (module, module.rpartition(".")[0])


def _is_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def installed_points() -> list[EntryPoint]:
    """The entry points of all plugins that are installed now, with that of the core."""
    points = [*importlib.metadata.entry_points(group=GROUP)]
    return points if any(point.value == CORE_MODULE for point in points) else [*points, CORE_POINT]


class _Discovery:
    """Builds the registry at the first call and caches it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._found: Registry | None = None
        self._running = False

    def __call__(self) -> Registry:
        with self._lock:
            if self._running:
                raise PluginError(
                    "plugin discovery is still running. A plugin module must not call axcore.use, axcore.recipe or "
                    "registry() at import or in a hook; call them in the target of an offer"
                )
            if self._found is None:
                self._running = True
                try:
                    self._found = Registry(installed_points(), os.environ)
                finally:
                    self._running = False
            return self._found

    def find[T: Offer](self, kind: type[T], name: str) -> tuple[Plugin, T] | None:
        """The offer of this kind and name (see `Registry.find`), also if its plugin was installed after discovery."""
        found = self().find(kind, name)
        return self().find(kind, name) if found is None and self.refresh() else found

    def refresh(self) -> bool:
        """Discovers plugins again if others are installed now, in a notebook for example. Returns whether there are.

        Called when a name is not found.
        """
        with self._lock:
            known = self().plugins
            importlib.invalidate_caches()
            if all(point.name in known for point in installed_points()):
                return False
            self.cache_clear()
            self()
            return True

    def cache_clear(self) -> None:
        """Makes the next call discover plugins again."""
        self._found = None


registry = _Discovery()
"""`registry()`: the plugins of this process."""


def resolve(plugin: Plugin, offer: Offer) -> Any:
    """Imports the target of an offer: a class or a function, whose type depends on the kind of the offer.

    Raises:
        PluginError: the import failed.
    """
    module, _, attribute = offer.target.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"the {offer.kind} {offer.name!r} of {plugin} could not be loaded from {offer.target!r}: {described(error)}"
        ) from error


def supplier(node: Config) -> Plugin | None:
    """The plugin that a node's class comes from; None for the core and for user code."""
    return registry().owner(type(node).__module__)


def described_supplier(node: Config) -> str:
    """The plugin of a node, as `" (axcore-x 0.1.0)"`. Empty for the core and for user code."""
    return f" ({plugin})" if (plugin := supplier(node)) else ""


def contributors(cfg: Config) -> dict[str, str]:
    """The plugins that supplied or edited a node of the tree: id -> `distribution version`. Includes plugins whose
    feature or mesh rule only set fields, as far as the history of the config reaches; the core is omitted."""
    actors = {event.actor for _, node in walk(cfg) for event in node.history()}
    edited = {
        id: str(plugin)
        for id, plugin in registry().plugins.items()
        if id != CORE and any(f" of {plugin}(" in actor for actor in actors)
    }
    return dict(sorted((active(cfg) | edited).items()))


def active(cfg: Config) -> dict[str, str]:
    """The plugins that supplied a node of the tree: id -> `distribution version`."""
    plugins = {plugin.id: str(plugin) for _, node in walk(cfg) if (plugin := supplier(node))}
    return dict(sorted(plugins.items()))
