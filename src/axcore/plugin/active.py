"""Which plugins a config really uses."""

from __future__ import annotations

from axcore.config import Config, walk
from axcore.plugin.registry import registry
from axcore.plugin.states import Plugin


def supplier(node: Config) -> Plugin | None:
    """The plugin that a node's class comes from; None for the core's own and for user code."""
    return registry().owner(type(node).__module__)


def active(cfg: Config) -> dict[str, str]:
    """Plugin id -> `distribution version`, of every plugin that supplied a node of the tree."""
    plugins = {plugin.id: str(plugin) for _, node in walk(cfg) if (plugin := supplier(node))}
    return dict(sorted(plugins.items()))
