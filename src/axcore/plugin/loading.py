"""Loading one plugin: its module, its hooks, its offers. Whatever it does wrong stays with it.

pluggy's own entry-point loader stops at the first broken plugin, so plugins are loaded one by one, and one that fails
is rolled back and remembered with its traceback.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import pathlib
import re
import reprlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pluggy

from axcore.config import did_you_mean
from axcore.plugin.faults import described, text_of
from axcore.plugin.hooks import API_VERSION, OFFERS, PROJECT, SUPPORTED_APIS
from axcore.plugin.offers import Offer
from axcore.plugin.states import Plugin, State, Unavailable

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
"""What a plugin and an offer may be called."""
TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""`module:attribute`."""
MOST_OFFERS = 10_000
"""How many things one hook may offer, as it might go on for ever."""

type Hook = Callable[..., Any]


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
        # What a plugin prints must not get into what the program prints, as in `axcore plugins --json`.
        with contextlib.redirect_stdout(sys.stderr):
            _load(plugin, manager, arguments)
    except Unavailable as reason:
        plugin.state, plugin.detail = State.UNAVAILABLE, text_of(reason) or "it does not say why"
    except BaseException as error:  # also SystemExit: a plugin must not end the program that looks at it
        if isinstance(error, KeyboardInterrupt) and not _raised_it(plugin, error):
            raise
        plugin.state, plugin.detail = State.FAILED, traceback.format_exc()
        plugin.api = stated_api(plugin.module) if plugin.api is None else plugin.api
        if plugin.api is not None and plugin.api not in SUPPORTED_APIS:
            # What it misses is what it was written for.
            plugin.state, plugin.detail = State.INCOMPATIBLE, f"{_other_api(plugin)} ({described(error)})"
    finally:
        if plugin.state is not State.LOADED and manager.has_plugin(plugin.id):
            manager.unregister(name=plugin.id)


def _load(plugin: Plugin, manager: Manager, arguments: Mapping[str, Any]) -> None:
    module = _module(plugin)
    api = getattr(module, "axcore_api", None)
    if api is not None and type(api) is not int:
        raise TypeError(f"axcore_api must be a whole number, not {reprlib.repr(api)}")
    plugin.api = api
    if api is not None and api not in SUPPORTED_APIS:
        plugin.state, plugin.detail = State.INCOMPATIBLE, _other_api(plugin)
        return
    hooks = list(_hooks(module, manager))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager.register(module, name=plugin.id)
    plugin.warnings = tuple(dict.fromkeys(str(each.message) for each in caught))
    plugin.offers = tuple(_offers(hooks, arguments))
    plugin.state = State.LOADED


def _raised_it(plugin: Plugin, interrupt: KeyboardInterrupt) -> bool:
    """Whether a `raise` in the plugin's code is where it comes from, and not somebody at the keyboard."""
    at = interrupt.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return False
    frame = at.tb_frame
    raised = dis.opname[frame.f_code.co_code[at.tb_lasti]] == "RAISE_VARARGS"
    return raised and f"{frame.f_globals.get('__name__')}.".startswith(f"{plugin.package}.")


def _module(plugin: Plugin) -> ModuleType:
    point = plugin.point
    if point.pattern.match(point.value) is None:
        raise ValueError(f"the entry point {point.value!r} names no module")
    module = point.load()
    if not isinstance(module, ModuleType):
        raise TypeError(f"the entry point {point.value!r} must name a module, not a {type(module).__name__}")
    return module


def _other_api(plugin: Plugin) -> str:
    told = f"it needs plugin API {plugin.api}; this axcore has {API_VERSION}"
    if plugin.api < API_VERSION:
        return f'{told}. The page "Moving a plugin to API 2" (docs/plugins/api_2.md) says what to change'
    return told


def _hooks(module: ModuleType, manager: Manager) -> Iterator[tuple[Hook, str, Sequence[str]]]:
    """The hooks that a module implements: each with the name of its spec, and the arguments there."""
    for name, value in vars(module).items():
        marks = manager.parse_hookimpl_opts(module, name)
        if marks is None:
            _refuse_unmarked(name, value)
            continue
        if value.__module__ != module.__name__:
            raise TypeError(f"{name} is imported from {value.__module__}; a plugin defines its hooks in its own module")
        hook = marks["specname"] or name
        caller = getattr(manager.hook, hook, None)
        if caller is not None and caller.spec is not None:
            _refuse_unknown_arguments(value, hook, caller.spec.argnames)
            yield value, hook, caller.spec.argnames
        elif not marks["optionalhook"]:  # an optional one is of a newer axcore
            raise TypeError(f"unknown hook {hook!r}.{did_you_mean(hook, OFFERS)} Known: {', '.join(OFFERS)}")


def _offers(hooks: Iterable[tuple[Hook, str, Sequence[str]]], arguments: Mapping[str, Any]) -> Iterator[Offer]:
    """What the hooks of one plugin return, checked here so that nothing wrong gets past discovery."""
    taken: set[tuple[type[Offer], str]] = set()
    for function, hook, known in hooks:
        kind = OFFERS[hook]
        offers = _call(function, known, arguments)
        if not isinstance(offers, Iterable):
            raise TypeError(f"{hook} must return a list of {kind.__name__}, not {reprlib.repr(offers)}")
        for number, offer in enumerate(offers, 1):
            if number > MOST_OFFERS:
                raise ValueError(f"{hook} offers more than {MOST_OFFERS} things; does it end?")
            if type(offer) is not kind:
                raise TypeError(f"{hook} must return a list of {kind.__name__}; {reprlib.repr(offer)} is none")
            if not all(isinstance(field, str) for field in vars(offer).values()):
                raise TypeError(f"{hook}: every field must be text; {reprlib.repr(vars(offer))}")
            if not NAME.fullmatch(offer.name):
                raise ValueError(f"{hook}: the name {offer.name!r} must be letters, digits, '.', '_' and '-'")
            if not TARGET.fullmatch(offer.target):
                raise ValueError(f"{hook}: target {offer.target!r} of {offer.name!r} is not 'module:attribute'")
            if (kind, offer.name) in taken:
                raise ValueError(f"{hook} offers {offer.name!r} twice")
            taken.add((kind, offer.name))
            yield offer


def _refuse_unknown_arguments(function: Hook, hook: str, known: Sequence[str]) -> None:
    """Refuses what no caller will give; an argument with a default may be the plugin's own."""
    for parameter in inspect.signature(function).parameters.values():
        free = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name not in known and parameter.default is parameter.empty and not free:
            listed = ", ".join(known) or "none"
            raise TypeError(f"{hook} has no argument {parameter.name!r}; it may take: {listed}")


def _call(function: Hook, known: Sequence[str], given: Mapping[str, Any]) -> Any:
    """Calls a hook with those arguments of its spec that it takes, be it with a default or without."""
    signature = inspect.signature(function)
    bound = inspect.BoundArguments(signature, {name: given[name] for name in signature.parameters if name in known})
    return function(*bound.args, **bound.kwargs)


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
                    value = ast.literal_eval(node.value)
                    return value if type(value) is int else None
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
