"""Discovery: which plugins are installed, what state each is in, and what they offer.

pluggy's own entry-point loader stops at the first broken plugin, so plugins are loaded here one by one: one that fails
is rolled back and remembered with its traceback, and is loud only when somebody wanted it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.metadata
import os
import traceback
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import pluggy

from axcore.config import AxcoreError, did_you_mean
from axcore.plugin.hooks import API_VERSION, FAMILIES, OFFERS, PROJECT
from axcore.plugin.offers import Offer

GROUP = "axcore.plugins"


class PluginError(AxcoreError):
    """A plugin is missing, broken, or in conflict with another; the message says what to do."""


class State(enum.StrEnum):
    """What became of a plugin."""

    DISCOVERED = "discovered"
    """Its entry point is known; its module was not imported yet."""
    DISABLED = "disabled"
    """AXCORE_DISABLE or AXCORE_PLUGINS keeps it out."""
    INCOMPATIBLE = "incompatible"
    """It needs another version of the plugin API."""
    UNAVAILABLE = "unavailable"
    """It said itself that it cannot run here, by raising `Unavailable` at import."""
    LOADED = "loaded"
    """Its hooks are registered and its offers can be used."""
    FAILED = "failed"
    """It raised, or does not keep to the hook specs; the traceback is kept."""


class Unavailable(Exception):
    """Raised by a plugin module at import when it cannot serve on this machine. Say why."""


@dataclasses.dataclass
class Plugin:
    """One installed plugin.

    Attributes:
        id: the entry point's name, its one id everywhere.
        distribution, version: what was pip-installed.
        module: the module that the entry point names.
        detail: why it is in this state, where that is not plain.
    """

    id: str
    module: str
    distribution: str
    version: str
    state: State = State.DISCOVERED
    detail: str = ""
    offers: tuple[Offer, ...] = ()

    @property
    def package(self) -> str:
        """The package that holds its module: what is below it is the plugin's."""
        return self.module.rpartition(".")[0] or self.module

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


class Registry:
    """The plugins of one process. `registry()` is the one that everything uses."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint], environ: Mapping[str, str]):
        self.plugins: dict[str, Plugin] = {}
        self._manager = pluggy.PluginManager(PROJECT)
        for family in FAMILIES:
            self._manager.add_hookspecs(family)
        points: dict[str, importlib.metadata.EntryPoint] = {}
        for point in sorted(entry_points, key=lambda point: (point.name, point.value)):
            self._note(point, points)
        disabled, only = _ids(environ, "AXCORE_DISABLE", points), _ids(environ, "AXCORE_PLUGINS", points)
        for plugin in self.plugins.values():
            if plugin.id in disabled or ("AXCORE_PLUGINS" in environ and plugin.id not in only):
                variable = "AXCORE_DISABLE" if plugin.id in disabled else "AXCORE_PLUGINS"
                plugin.state, plugin.detail = State.DISABLED, f"by {variable}"
            elif plugin.state is State.DISCOVERED:
                self._load(plugin, points[plugin.id])

    def find[T: Offer](self, kind: type[T], name: str) -> tuple[Plugin, T] | None:
        """The offer of this kind and name, with the plugin that makes it; None when nobody does.

        Raises:
            PluginError: two plugins claim the name.
        """
        claims = [(plugin, offer) for plugin, offer in self.offers(kind) if offer.name == name]
        if len(claims) > 1:
            names = " and ".join(f"{plugin.id} ({plugin})" for plugin, _ in claims)
            raise PluginError(
                f"the {kind.kind} {name!r} is offered by {names}; uninstall one, or AXCORE_DISABLE={claims[0][0].id}"
            )
        return claims[0] if claims else None

    def offers[T: Offer](self, kind: type[T]) -> list[tuple[Plugin, T]]:
        """Every offer of a kind, by plugin id."""
        return [(plugin, offer) for plugin in self.plugins.values() for offer in plugin.offers if type(offer) is kind]

    def why_missing(self, name: str) -> str:
        """What is known of a plugin that could have offered `name` but does not; `""` when nothing is."""
        for plugin in self.plugins.values():
            is_it = name in (plugin.id, plugin.distribution, plugin.distribution.removeprefix("axcore-"))
            if is_it and plugin.state is not State.LOADED:
                last = plugin.detail.strip().splitlines()[-1] if plugin.detail else ""
                return f"plugin {plugin.id!r} ({plugin}) is installed but {plugin.state}: {last}"
        return ""

    def owner(self, module: str) -> Plugin | None:
        """The plugin whose package holds a module."""
        inside = [plugin for plugin in self.plugins.values() if f"{module}.".startswith(f"{plugin.package}.")]
        return max(inside, key=lambda plugin: len(plugin.package), default=None)

    def _note(self, point: importlib.metadata.EntryPoint, points: dict[str, Any]) -> None:
        metadata = point.dist.metadata if point.dist else None
        name, version = (metadata.get(key) if metadata else None for key in ("Name", "Version"))
        name, version = name or "unknown", version or "?"
        module = point.value.partition(":")[0].strip()
        known = self.plugins.get(point.name)
        if known is None:
            points[point.name] = point
            self.plugins[point.name] = Plugin(point.name, module, name, version)
        elif (known.module, known.distribution) != (module, name):  # the same twice is an editable install
            known.state = State.FAILED
            known.detail = f"two distributions claim the id {point.name!r}: {known} and {name} {version}; uninstall one"

    def _load(self, plugin: Plugin, point: importlib.metadata.EntryPoint) -> None:
        try:
            if point.pattern.match(point.value) is None:
                raise ValueError(f"the entry point {point.value!r} names no module")
            module = point.load()
            if not isinstance(module, ModuleType):
                raise TypeError(f"the entry point {point.value!r} must name a module, not a {type(module).__name__}")
            needs = getattr(module, "axcore_api", API_VERSION)
            if needs != API_VERSION:
                plugin.state = State.INCOMPATIBLE
                plugin.detail = f"it needs plugin API {needs}; this axcore has {API_VERSION}"
                return
            self._manager.register(module, name=plugin.id)
            self._manager.check_pending()
            plugin.offers = tuple(_offers(module))
            plugin.state = State.LOADED
        except Unavailable as reason:
            plugin.state, plugin.detail = State.UNAVAILABLE, str(reason)
        except KeyboardInterrupt:
            raise
        except BaseException:  # also SystemExit: a plugin must not end the program that looks at it
            plugin.state, plugin.detail = State.FAILED, traceback.format_exc()
        if plugin.state is not State.LOADED and self._manager.has_plugin(plugin.id):
            self._manager.unregister(name=plugin.id)


@functools.cache
def registry() -> Registry:
    """The plugins of this process, found once, at first use."""
    return Registry(importlib.metadata.entry_points(group=GROUP), os.environ)


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


def _offers(module: ModuleType) -> Iterable[Offer]:
    """What the hooks of one plugin return, checked here so that nothing wrong gets past discovery."""
    for name, value in vars(module).items():
        if name.startswith("axcore_") and callable(value):
            if name not in OFFERS:
                raise TypeError(f"{name} is not a hook.{did_you_mean(name, OFFERS)}")
            if not hasattr(value, f"{PROJECT}_impl"):
                raise TypeError(f"{name} is not marked; put @hookimpl above it")
    taken: set[tuple[str, str]] = set()
    for hook, kind in OFFERS.items():
        implementation = getattr(module, hook, None)
        offers = implementation() if implementation is not None else []
        if not isinstance(offers, Iterable):
            raise TypeError(f"{hook} must return a list of {kind.__name__}, not {offers!r}")
        for offer in offers:
            if type(offer) is not kind:
                raise TypeError(f"{hook} must return a list of {kind.__name__}; {offer!r} is none")
            if ":" not in offer.target:
                raise ValueError(f"{hook}: target {offer.target!r} of {offer.name!r} is not 'module:attribute'")
            if (hook, offer.name) in taken:
                raise ValueError(f"{hook} offers {offer.name!r} twice")
            taken.add((hook, offer.name))
            yield offer


def _ids(environ: Mapping[str, str], variable: str, known: Iterable[str]) -> set[str]:
    ids = {part.strip() for part in environ.get(variable, "").split(",") if part.strip()}
    for unknown in sorted(ids - set(known)):
        raise PluginError(f"{variable} names {unknown!r}, which is not installed.{did_you_mean(unknown, known)}")
    return ids
