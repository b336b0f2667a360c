"""Determines from config trees where a feature is and where it should be.

A feature's *anchors* are the nodes of the original tree that contain its nodes, that it replaced, or whose values it
changed. Each has a *role*: the slot of a kind of parent, filled by a kind of node. If a role was an anchor in any
variant, every variant with a node of this role should have the feature there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from axcore.config import Config, get, walk


@dataclasses.dataclass(frozen=True)
class Role:
    """The place of a node: names of its parent's classes, the slot, and names of its own classes, subclasses first."""

    parents: tuple[str, ...]
    slot: str
    classes: tuple[str, ...]

    def covers(self, other: Role) -> bool:
        """Whether another place is of the same kind: the same slot name, and the same classes or subclasses."""
        same_parent = not self.parents or self.parents[0] in other.parents
        return self.slot == other.slot and same_parent and self.classes[0] in other.classes

    def __str__(self) -> str:
        short = [name.rpartition(".")[2] for name in (*self.parents[:1], self.classes[0])]
        return f"{short[0]}.{self.slot} ({short[-1]})" if self.parents else short[-1]


@dataclasses.dataclass(frozen=True)
class Places:
    """The places in one variant.

    Attributes:
        brought: paths in the new tree of the plugin's nodes.
        anchors: path in the original tree -> role, for the anchors.
        roles: path in the original tree -> role, for every node.
    """

    brought: tuple[str, ...]
    anchors: dict[str, Role]
    roles: dict[str, Role]

    def missing(self, expected: Iterable[Role]) -> list[str]:
        """Paths of the original tree where the feature is expected by these roles but missing."""
        expected = set(expected)
        wanted = {path for path, role in self.roles.items() if any(each.covers(role) for each in expected)}
        return sorted(wanted - self.anchors.keys())


def places(before: Config, after: Config, package: str) -> Places:
    """The places where a feature of a plugin was attached, given the plugin's package."""
    roles = dict(_roles(before))
    brought = tuple(path for path, node in walk(after) if f"{type(node).__module__}.".startswith(f"{package}."))
    anchors = {_nearest(path, roles) for path in brought} | set(_edited(before, after))
    return Places(brought, {path: roles[path] for path in sorted(anchors)}, roles)


def _roles(root: Config) -> Iterable[tuple[str, Role]]:
    for path, node in walk(root):
        names = path.split(".") if path else []
        while names and not isinstance(get(root, ".".join(names[:-1])), Config):  # the tuple or mapping is the slot
            names.pop()
        slot = names.pop() if names else ""
        parents = _classes(get(root, ".".join(names))) if slot else ()
        yield path, Role(parents, slot, _classes(node))


def _classes(node: Any) -> tuple[str, ...]:
    """The names of the classes that a node builds or is an instance of."""
    cls = type(node).target or type(node)
    return tuple(f"{each.__module__}.{each.__qualname__}" for each in cls.__mro__ if each is not object)


def _nearest(path: str, known: Iterable[str]) -> str:
    """The longest known path among this one and its ancestors."""
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path


def _edited(before: Config, after: Config) -> Iterable[str]:
    """Nodes that were replaced by a node of another class or with other values."""
    now = dict(walk(after))
    for path, node in walk(before):
        other = now.get(path)
        if other is not None and (_classes(other) != _classes(node) or _values(node) != _values(other)):
            yield path


def _values(node: Config) -> dict[str, Any]:
    """The fields without nodes."""
    held = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return {name: value for name, value in held.items() if next(iter(walk(value)), None) is None}
