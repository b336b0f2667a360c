"""The measured feature, the plugin that offers it, and the owners of sources."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axcore.config import ConfigError
from axcore.plugin import Feature, Offer, Plugin, Recipe, registry, use_text
from axcore.plugin.offers import OFFERS
from axcore_loc.lines import code_lines
from axcore_loc.workspace import PACKAGE

CORE = "core"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A feature that `axcore.use` attaches by name, with its options."""

    name: str
    options: Mapping[str, Any]
    plugin: Plugin
    offer: Offer

    @property
    def package(self) -> str:
        return self.plugin.package


def find(text: str) -> Measured:
    """The feature that `--use TEXT` attaches.

    Raises:
        AxcoreError: no plugin offers it, an option is invalid, or the core itself offers it.
    """
    modifier = use_text(text)  # raises if the text is invalid
    name = text.partition(":")[0]
    kinds = [kind for kind in OFFERS.values() if kind is Feature or kind.slot]
    plugin, offer = next(found for kind in kinds if (found := registry().find(kind, name)) is not None)
    if plugin.id == CORE:
        raise ConfigError(f"{name!r} is a feature of the core. `axcore loc measure` requires a feature of a plugin.")
    return Measured(name, dict(modifier.options), plugin, offer)


def package_sources(package: str) -> dict[str, str]:
    """Path -> source of every module of an installed package, without importing it.

    Excludes Python files in folders that are not packages (templates).
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        return {}
    if not spec.submodule_search_locations:
        return {f"{package}.py": Path(spec.origin or "").read_text()}
    found = {}
    for folder in map(Path, spec.submodule_search_locations):
        for file in sorted(folder.rglob("*.py")):
            path = file.relative_to(folder)
            if all((folder / parent / "__init__.py").exists() for parent in path.parents):
                found[f"{package}/{path.as_posix()}"] = file.read_text()
    return found


def existing_sources(measured: Measured) -> dict[str, dict[str, str]]:
    """Owner -> path -> source of the modules that exist without the feature: the core and packages of recipes."""
    offering = {plugin.package for plugin, _ in registry().offers(Recipe)} - {measured.package, PACKAGE}
    recipes = [package_sources(package) for package in sorted(offering)]
    return {CORE: package_sources("axcore"), "recipe": {path: text for each in recipes for path, text in each.items()}}


def names_of(measured: Measured) -> frozenset[str]:
    """Names that refer to this plugin: its package, its offers and its public classes.

    Excludes names of classes that the core also defines, since they may refer to the core.
    """
    taken = set().union(*map(_classes, package_sources("axcore").values()))
    own = set().union(*map(_classes, package_sources(measured.package).values()))
    function = measured.offer.target.rpartition(":")[2].rpartition(".")[2]
    return frozenset({measured.package, measured.name, measured.plugin.id, function} | (own - taken))


def size(measured: Measured) -> int:
    """Lines of code of the plugin itself."""
    return sum(len(code_lines(source)) for source in package_sources(measured.package).values())


def _classes(source: str) -> set[str]:
    """Names of the public classes of a module."""
    found = (node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return {name for name in found if not name.startswith("_")}


CoreObjects = dict[tuple[str, str], Any]


def core_objects() -> CoreObjects:
    """(module, name) -> object, for every loaded function, class and class attribute of the core."""
    found: CoreObjects = {}
    for module, loaded in list(sys.modules.items()):
        if loaded is None or not f"{module}.".startswith("axcore."):
            continue
        for name, value in vars(loaded).items():
            if callable(value):
                found[module, name] = value
            if isinstance(value, type) and value.__module__ == module:
                found |= {(module, f"{name}.{part}"): item for part, item in vars(value).items() if callable(item)}
    return found


def replaced(before: CoreObjects, after: CoreObjects) -> list[str]:
    """The objects that a plugin replaced at run time. No source file shows such a replacement."""
    return sorted(".".join(key) for key, value in before.items() if after.get(key) is not value)
