"""Imports the code that a saved config needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any

from axcore.config import Config, type_name, walk
from axcore.plugin.attribution import described
from axcore.plugin.registry import GROUP, registry
from axcore.plugin.states import CORE, Plugin, PluginError, State


def import_saved(content: Any) -> None:  # Any: JSON
    """Imports the modules that define the classes and functions that a saved config names.

    A file can only choose among the modules of registered packages: those of loaded plugins, and those of entry points
    in other groups whose name begins with `axcore_`, such as `axcore_hf.families`. Other names are skipped, and so are
    distributions that AXCORE_ALLOWLIST does not list.

    Raises:
        PluginError: the import of such a module failed.
    """
    names = set(_names(content, "$type", "$name"))
    packages = set(_packages()) if names else set()
    for name in sorted(names):
        if name.partition(".")[0] not in packages or (module := _module(name)) is None:
            continue
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{name}, which the saved config names, could not be imported: {described(error)}"
            ) from error


def unregistered(cfg: Config) -> list[str]:
    """The classes of a config that another process cannot import, since no registered package defines them."""
    packages = {"axcore", *_packages()}
    names = sorted({type_name(type(node)) for _, node in walk(cfg)})
    return [name for name in names if name.partition(".")[0] not in packages]


def _names(content: Any, *keys: str) -> Iterator[str]:
    if isinstance(content, dict):
        for key, value in content.items():
            if key in keys and isinstance(value, str):
                yield value
            else:
                yield from _names(value, *keys)
    elif isinstance(content, list):
        for value in content:
            yield from _names(value, *keys)


def _packages() -> Iterator[str]:
    """The top-level packages that are registered and may be imported."""
    found = registry()
    for plugin in found.plugins.values():
        if plugin.state is State.LOADED and plugin.id != CORE:
            yield plugin.module.partition(".")[0]
    points: Iterable[Any] = importlib.metadata.entry_points()
    for point in points:
        if point.group.startswith("axcore_") and point.group != GROUP:
            allowlist = found.controls.allowlist
            if allowlist is None or not allowlist.why_refused(Plugin(point)):
                yield point.module.partition(".")[0]


def _module(name: str) -> str | None:
    """The module in a qualified name: its longest part that is a module, and not a program."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            if importlib.util.find_spec(module) is not None:
                return None if parts[end - 1] == "__main__" else module
        except (ImportError, ValueError):  # the part before the last one is not a package
            continue
    return None
