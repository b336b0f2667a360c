"""Loading one plugin: its module, its hooks, its offers. Whatever it does wrong stays with it.

pluggy's own entry-point loader stops at the first broken plugin, so plugins are loaded one by one, and one that fails
is rolled back and remembered with its traceback.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pluggy

from axcore.config import did_you_mean
from axcore.plugin.hooks import API_VERSION, OFFERS, PROJECT, SUPPORTED_APIS
from axcore.plugin.offers import Offer
from axcore.plugin.states import Plugin, State, Unavailable

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
"""What an offer may be called."""


class Manager(pluggy.PluginManager):
    """pluggy's, for plugins that are modules: whether a name is a hook is read from its mark alone, which is quick."""

    def __init__(self, families: Iterable[type]):
        super().__init__(PROJECT)
        for family in families:
            self.add_hookspecs(family)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        marks = getattr(getattr(plugin, name, None), f"{PROJECT}_impl", None)
        return marks if isinstance(marks, dict) else None


def load(plugin: Plugin, manager: Manager, arguments: Mapping[str, Any]) -> None:
    """Imports a plugin's module, calls its hooks and puts down in `plugin` what came of it.

    Args:
        manager: knows the hook specs; the plugin is registered there if and only if it ends up loaded.
        arguments: the values for the arguments of hooks, by name.
    """
    try:
        module = _module(plugin)
        plugin.api = getattr(module, "axcore_api", None)
        if plugin.api is not None and plugin.api not in SUPPORTED_APIS:
            plugin.state, plugin.detail = State.INCOMPATIBLE, _other_api(plugin)
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            manager.register(module, name=plugin.id)
            manager.check_pending()
        plugin.warnings = tuple(dict.fromkeys(str(each.message) for each in caught))
        plugin.offers = tuple(_offers(module, manager, arguments))
        plugin.state = State.LOADED
    except Unavailable as reason:
        plugin.state, plugin.detail = State.UNAVAILABLE, str(reason)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: a plugin must not end the program that looks at it
        plugin.state, plugin.detail = State.FAILED, traceback.format_exc()
        plugin.api = stated_api(plugin.module) if plugin.api is None else plugin.api
        if plugin.api is not None and plugin.api not in SUPPORTED_APIS:
            # What it misses is what it was written for.
            plugin.state, plugin.detail = State.INCOMPATIBLE, f"{_other_api(plugin)} ({type(error).__name__}: {error})"
    finally:
        if plugin.state is not State.LOADED and manager.has_plugin(plugin.id):
            manager.unregister(name=plugin.id)


def _module(plugin: Plugin) -> ModuleType:
    point = plugin.point
    if point.pattern.match(point.value) is None:
        raise ValueError(f"the entry point {point.value!r} names no module")
    module = point.load()
    if not isinstance(module, ModuleType):
        raise TypeError(f"the entry point {point.value!r} must name a module, not a {type(module).__name__}")
    return module


def _other_api(plugin: Plugin) -> str:
    return f"it needs plugin API {plugin.api}; this axcore has {API_VERSION}"


def _offers(module: ModuleType, manager: Manager, arguments: Mapping[str, Any]) -> Iterator[Offer]:
    """What the hooks of one plugin return, checked here so that nothing wrong gets past discovery."""
    taken: set[tuple[type[Offer], str]] = set()
    for name, value in vars(module).items():
        marks = manager.parse_hookimpl_opts(module, name)
        if marks is None:
            _refuse_unmarked(name, value)
            continue
        caller = getattr(manager.hook, marks.get("specname") or name)
        if not caller.has_spec():  # optional, of a newer axcore
            continue
        kind = OFFERS[caller.name]
        names = next(impl.argnames for impl in reversed(caller.get_hookimpls()) if impl.function is value)
        offers = value(*(arguments[name] for name in names))
        if not isinstance(offers, Iterable):
            raise TypeError(f"{caller.name} must return a list of {kind.__name__}, not {offers!r}")
        for offer in offers:
            if type(offer) is not kind:
                raise TypeError(f"{caller.name} must return a list of {kind.__name__}; {offer!r} is none")
            if not all(isinstance(field, str) for field in vars(offer).values()):
                raise TypeError(f"{caller.name}: every field must be text; {offer!r}")
            if not NAME.fullmatch(offer.name):
                raise ValueError(f"{caller.name}: the name {offer.name!r} must be letters, digits, '.', '_' and '-'")
            if ":" not in offer.target:
                raise ValueError(f"{caller.name}: target {offer.target!r} of {offer.name!r} is not 'module:attribute'")
            if (kind, offer.name) in taken:
                raise ValueError(f"{caller.name} offers {offer.name!r} twice")
            taken.add((kind, offer.name))
            yield offer


def _refuse_unmarked(name: str, value: Any) -> None:
    """A function that looks like a hook and is none is a slip, and would be passed over in silence."""
    if name.startswith("axcore_") and callable(value):
        if name not in OFFERS:
            raise TypeError(f"{name} is not a hook.{did_you_mean(name, OFFERS)}")
        raise TypeError(f"{name} is not marked; put @hookimpl above it")


def stated_api(module: str) -> Any:
    """The value of `axcore_api` in the source of a module that is not imported; None where there is none to be read."""
    origin = next((spec.origin for spec in reversed(specs(module)) if spec.name == module), None)
    try:
        tree = ast.parse(pathlib.Path(origin or "").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == "axcore_api" for target in targets):
                    return ast.literal_eval(node.value)
    except (OSError, ValueError, SyntaxError):
        pass
    return None


def specs(module: str) -> list[ModuleSpec]:
    """Where a module and the packages above it would be imported from, outermost first. Imports none of them.

    Ends early where one is not found.
    """
    found: list[ModuleSpec] = []
    path = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = next((s for finder in sys.meta_path if (s := finder.find_spec(name, path)) is not None), None)
        if spec is None:
            break
        found.append(spec)
        path = spec.submodule_search_locations
    return found
