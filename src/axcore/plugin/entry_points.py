"""The entry points of plugins, as distributions state them."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import Distribution, EntryPoint

from axcore.plugin.faults import described
from axcore.plugin.states import CORE, CORE_MODULE, Plugin, State

GROUP = "axcore.plugins"
CORE_POINT = EntryPoint(CORE, CORE_MODULE, GROUP)
"""The core's own, for a copy of axcore that no installer has written entry points for."""


def installed_points() -> tuple[list[EntryPoint], list[Plugin]]:
    """The entry points of the group, and a failed plugin for each distribution whose list of them cannot be read."""
    unreadable: list[Plugin] = []
    try:
        points = [*importlib.metadata.entry_points(group=GROUP)]
    except Exception:  # because of one distribution, which need not even be a plugin's
        points, unreadable = _one_by_one()
    if not any(point.name == CORE and point.value == CORE_MODULE for point in points):
        points.append(CORE_POINT)
    return points, unreadable


def _one_by_one() -> tuple[list[EntryPoint], list[Plugin]]:
    points: list[EntryPoint] = []
    unreadable: list[Plugin] = []
    seen = set()
    for dist in importlib.metadata.distributions():
        name = dist.metadata.get("Name")
        if name in seen:  # one that comes earlier on sys.path hides it
            continue
        seen.add(name)
        try:
            points += dist.entry_points.select(group=GROUP)
        except Exception as error:
            if GROUP in (dist.read_text("entry_points.txt") or ""):
                unreadable.append(_unreadable(dist, error))
    return points, unreadable


def _unreadable(dist: Distribution, error: Exception) -> Plugin:
    plugin = Plugin(EntryPoint(dist.metadata.get("Name") or "unknown", "", GROUP))
    plugin.metadata = dist.metadata  # type: ignore[assignment]
    plugin.state = State.FAILED
    plugin.detail = f"the entry_points.txt of {plugin} cannot be read: {described(error)}"
    return plugin
