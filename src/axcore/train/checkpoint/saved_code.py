"""Imports the code that a saved config requires."""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from axcore.config import AxcoreError, Config, type_name, walk
from axcore.plugin import Plugin, PluginError, State, registry
from axcore.plugin.attribution import described
from axcore.plugin.loading import specs


def import_plugins(plugins: Mapping[str, str], folder: pathlib.Path) -> None:
    """Imports the objects that these plugins provide, so that configs of their classes can be read.

    Raises:
        AxcoreError: a plugin is not installed or does not load.
    """
    known = registry().plugins
    for name, version in plugins.items():
        plugin = known.get(name)
        if plugin is None or plugin.state is not State.LOADED:
            why = "is not installed" if plugin is None else f"is {plugin.state.value}"
            raise AxcoreError(
                f"the model in {folder} requires the plugin {name!r} ({version}), which {why}. See `axcore plugins`."
            )
        for offer in plugin.offers:
            importlib.import_module(offer.target.partition(":")[0])


def import_saved(content: Any) -> None:  # Any: JSON
    """Imports the modules that define the classes and functions that a saved config names.

    A file can only choose among the modules of registered packages: those of loaded plugins, and those of entry points
    in other groups whose name begins with `axcore_`, such as `axcore_hf.families`. Other names are skipped, and so are
    distributions that AXCORE_ALLOWLIST does not list.

    Raises:
        PluginError: the import of such a module failed.
    """
    names = set(_names(content))
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
    packages = set(_packages())
    names = sorted({type_name(type(node)) for _, node in walk(cfg)})
    return [name for name in names if name.partition(".")[0] not in packages]


def _names(content: Any) -> Iterator[str]:
    """The names of the classes and functions in JSON."""
    if isinstance(content, dict):
        yield from (name for key in ("$type", "$name") if isinstance(name := content.get(key), str))
        content = [*content.values()]
    for value in content if isinstance(content, list) else ():
        yield from _names(value)


def _packages() -> Iterator[str]:
    """The top-level packages that are registered and may be imported."""
    found = registry()
    for plugin in found.plugins.values():
        if plugin.state is State.LOADED:
            yield plugin.module.partition(".")[0]
    points: Iterable[Any] = importlib.metadata.entry_points()
    for point in points:
        if point.group.startswith("axcore_"):
            allowlist = found.controls.allowlist
            if allowlist is None or not allowlist.why_refused(Plugin(point)):
                yield point.module.partition(".")[0]


def _module(name: str) -> str | None:
    """The module in a qualified name: its longest part that is a module, and not a program."""
    found = [spec.name for spec in specs(name)]
    return found[-1] if found and not found[-1].endswith(".__main__") else None
