"""Loading one plugin: its module, its hooks, its offers. A failing plugin does not affect others.

Plugins are loaded one at a time, because pluggy's `load_setuptools_entrypoints` and its hook calls stop at the first
error. Each has a plugin manager of its own.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pathlib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

from axcore.config import did_you_mean
from axcore.plugin.accelerators import EXAMPLES, matchable
from axcore.plugin.attribution import described
from axcore.plugin.hooks import API_VERSION, PROJECT, manager
from axcore.plugin.host import Host
from axcore.plugin.offers import OFFERS, MeshRule, Offer
from axcore.plugin.states import Plugin, State, Unavailable

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
TARGET = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def load(plugin: Plugin) -> None:
    """Imports a plugin's module, calls its hooks and records the result in `plugin`."""
    cause = ""
    try:
        if not re.fullmatch(r"[\w.]+", plugin.module):
            raise ValueError(f"the entry point {plugin.module!r} must name a module, such as 'axcore_gate.plugin'")
        module = importlib.import_module(plugin.module)
        api = getattr(module, "axcore_api", None)
        if not isinstance(api, int | None):
            raise TypeError(f"axcore_api must be an integer, not {type(api).__name__}")
        plugin.api = api
        if plugin.api in (None, API_VERSION):
            plugin.offers = tuple(_offers(module))
            plugin.state = State.LOADED
    except Unavailable as reason:
        plugin.state, plugin.detail = State.UNAVAILABLE, str(reason) or "no reason given"
        return
    except (Exception, SystemExit) as error:
        plugin.state, plugin.detail = State.FAILED, traceback.format_exc()
        plugin.api, cause = plugin.api or _api_in_source(plugin.module), f" ({described(error)})"
    if plugin.api is not None and plugin.api != API_VERSION:
        # If the module also raised, it probably imports names that this version of axcore does not have.
        remedy = "Install a later axcore, or an earlier version of the plugin"
        if plugin.api < API_VERSION:
            remedy = (
                'Install a later version of the plugin. Its author finds what to change on the page "Moving a plugin '
                f'to API {API_VERSION}" (docs/plugins/api_{API_VERSION}.md)'
            )
        plugin.state = State.INCOMPATIBLE
        plugin.detail = f"axcore_api={plugin.api}, but this axcore has plugin API {API_VERSION}. {remedy}{cause}"


def _offers(module: ModuleType) -> Iterator[Offer]:
    """The offers that the hooks of one plugin return, checked."""
    _check_names(module)
    hooks = manager()
    hooks.register(module)
    hooks.check_pending()
    taken: set[tuple[type[Offer], str]] = set()
    for hook, kind in OFFERS.items():
        caller = getattr(hooks.hook, hook)
        for offers in caller(host=Host(API_VERSION)) or [None] * len(caller.get_hookimpls()):  # pluggy leaves None out
            if not isinstance(offers, Iterable):
                raise TypeError(f"{hook} must return a list of {kind.__name__}, not {type(offers).__name__}")
            for offer in offers:
                if type(offer) is not kind:
                    raise TypeError(f"{hook} must return a list of {kind.__name__}, not of {type(offer).__name__}")
                texts = {name: value for name, value in vars(offer).items() if name != "devices"}
                if not all(isinstance(value, str) for value in texts.values()):
                    raise TypeError(f"{hook}: every field of an offer must be a string, got {texts}")
                if not NAME.fullmatch(offer.name):
                    raise ValueError(f"{hook}: the name {offer.name!r} may contain only letters, digits, '.', '_', '-'")
                if not TARGET.fullmatch(offer.target):
                    raise ValueError(f"{hook}: target {offer.target!r} of {offer.name!r} is not 'module:attribute'")
                if isinstance(offer, MeshRule):
                    _check_rule(hook, offer)
                if (kind, offer.name) in taken:
                    raise ValueError(f"{hook} offers {offer.name!r} twice")
                taken.add((kind, offer.name))
                yield offer


def _check_rule(hook: str, rule: MeshRule) -> None:
    """Raises ValueError for a mesh rule that applies to no accelerator."""
    if not matchable(rule.pattern):
        raise ValueError(
            f"{hook}: no accelerator matches the pattern {rule.pattern!r} of {rule.name!r}. Accelerators are named as "
            f"in {EXAMPLES}"
        )
    match rule.devices:
        case (int(least), None) if least >= 1:
            return
        case (int(least), int(most)) if 1 <= least <= most:
            return
    raise ValueError(
        f"{hook}: devices={rule.devices!r} of {rule.name!r} must be the least and the largest number of devices, as in "
        f"(1, 8), or (16, None) for no limit"
    )


def _check_names(module: ModuleType) -> None:
    """Raises TypeError for a function that is named like a hook, `axcore_...`, but that pluggy would ignore or call
    with other arguments."""
    for name, value in vars(module).items():
        if name.startswith("axcore_") and inspect.isfunction(value):
            marks = getattr(value, f"{PROJECT}_impl", None)
            if name not in OFFERS and not (marks and (marks["optionalhook"] or marks["specname"])):
                raise TypeError(f"{name} is not a hook.{did_you_mean(name, OFFERS)} Known: {', '.join(OFFERS)}")
            if marks is None:
                raise TypeError(f"{name} is not decorated with @hookimpl")
            given = inspect.signature(value).parameters.values()
            unknown = [each.name for each in given if each.name != "host" and each.default is each.empty]
            if name in OFFERS and unknown:
                raise TypeError(f"{name} takes the argument {unknown[0]!r}, but a hook takes only 'host', or nothing")


def _api_in_source(module: str) -> int | None:
    """The value of `axcore_api` in the source of a module that cannot be imported; None if it cannot be read."""
    origin = next((spec.origin for spec in specs(module) if spec.name == module), None)
    if origin is None or not origin.endswith(".py"):
        return None
    source = pathlib.Path(origin).read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^axcore_api\b[^=\n]*= *(\d+) *(#.*)?$", source, re.MULTILINE)
    return int(found[1]) if found else None


def specs(name: str) -> list[ModuleSpec]:
    """Where the modules in a qualified name would be imported from, outermost first, without importing them."""
    found: list[ModuleSpec] = []
    path = None
    for module in itertools.accumulate(name.split("."), "{}.{}".format):
        spec = next(filter(None, (finder.find_spec(module, path) for finder in sys.meta_path)), None)
        if spec is None:
            break
        found.append(spec)
        path = spec.submodule_search_locations
        if path is None:  # a module has no modules
            break
    return found
