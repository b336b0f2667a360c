"""Paths through a config tree: walking, reading and replacing nodes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from axcore.config.errors import ConfigError, did_you_mean
from axcore.config.frozen import FrozenDict
from axcore.config.history import History
from axcore.config.node import Config, field_names, fields

NESTING = (Config, tuple, FrozenDict)
"""The classes of values that may contain nodes. They are concrete because `isinstance` is ten times slower with
an abstract class."""

REMOVED = object()
"""The result of an edit that removes its node."""


def join(path: str, name: str | int) -> str:
    return f"{path}.{name}" if path else str(name)


def parts(value: object) -> Iterator[tuple[str, object]]:
    """(path segment, value) of each field of a node, item of a tuple or entry of a mapping."""
    if isinstance(value, Config):
        yield from fields(value)
    elif isinstance(value, tuple):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, FrozenDict):
        yield from value.items()


def walk(value: object, path: str = "") -> Iterator[tuple[str, Config]]:
    """Every (path, node) of a tree, parents first. The path of the root is `""`."""
    if isinstance(value, Config):
        yield path, value
    for name, part in parts(value):
        if isinstance(part, NESTING):
            yield from walk(part, join(path, name))


def get(root: Config, path: str) -> Any:  # Any: the path determines the type
    """The node or value at a path such as `model.decoder.layers.attention.num_heads`.

    Raises:
        ConfigError: The path does not exist. The message suggests the nearest one.
    """
    value: Any = root
    for name in path.split(".") if path else ():
        below = dict(parts(value))
        if name not in below:
            raise no_such_path(root, path)
        value = below[name]
    return value


def history(root: Config, path: str) -> History:
    """The history of the node or value at a path: the events of the node, and those of its parent that set it."""
    value, names = get(root, path), path.split(".") if path else []
    events = [*value.__dict__.get("_history", ())] if isinstance(value, Config) else []
    # The nearest node above holds the value in one of its fields, possibly inside a tuple or mapping.
    while names and not isinstance(parent := get(root, ".".join(names[:-1])), Config):
        names.pop()
    if names:
        name = names[-1]
        events += [each for each in parent.__dict__.get("_history", ()) if name in each.names and each not in events]
    return History(events)


def no_such_path(root: Config, path: str) -> ConfigError:
    known = [join(parent, name) for parent, node in walk(root) for name in field_names(type(node))]
    leaf = path.rpartition(".")[2]
    hint = did_you_mean(path, known)
    if not hint:  # often the field name is right but the path above it is wrong
        same = [other for other in known if other.rpartition(".")[2] == leaf]
        hint = f" Did you mean {same[0]!r}?" if same else ""
    return ConfigError(f"the config has no {path!r}.{hint}")


def put(value: object, path: str, new: object) -> Any:  # Any: `new` may replace the root
    """A copy of the tree with `new` at `path`. The path must exist or be a new key of a mapping."""

    def at(value: object, rest: str) -> Any:  # Any: as above
        if not rest:
            return new
        name, _, rest = rest.partition(".")
        below = dict(parts(value))
        if name not in below and not (isinstance(value, Mapping) and not rest):
            has = f"It has {', '.join(below)}." if below else "It has no parts."
            raise ConfigError(f"{path}: {type(value).__name__} has no {name!r}.{did_you_mean(name, below)} {has}")
        return rebuild(value, {name: at(below.get(name), rest)})

    return at(value, path)


def rebuild(value: Any, changes: Mapping[str, object]) -> Any:  # Any: a node, tuple or mapping
    """A copy of a node, tuple or mapping with some of its parts replaced."""
    if isinstance(value, Config):
        return value._with({name: None if new is REMOVED else new for name, new in changes.items()})
    if isinstance(value, tuple):
        items = (changes.get(str(index), item) for index, item in enumerate(value))
        return tuple(item for item in items if item is not REMOVED)
    return FrozenDict({key: item for key, item in {**value, **changes}.items() if item is not REMOVED})


def transform(value: object, edit: Callable[[str, Config], object], path: str = "") -> Any:  # Any: as in `rebuild`
    """Applies `edit` to every node, children first. The new tree shares unchanged parts with the old one.

    An edit that returns `REMOVED` removes its node from the tuple or mapping, or sets the field to None.
    """
    changes = {}
    for name, part in parts(value):
        if isinstance(part, NESTING):
            new = transform(part, edit, join(path, name))
            if new is not part:
                changes[name] = new
    if changes:
        try:
            value = rebuild(value, changes)
        except ConfigError as error:
            raise ConfigError(f"at {path or 'the root'}: {error}") from error
    return edit(path, value) if isinstance(value, Config) else value


@functools.cache
def glob(pattern: str) -> re.Pattern[str]:
    """A path pattern as a regular expression: `*` matches within one segment, `**` matches zero or more segments."""
    steps = []
    for segment in pattern.split("."):
        steps.append(r"(?:[^.]+\.)*" if segment == "**" else _segment(segment) + r"\.")
    return re.compile("".join(steps))


def _segment(segment: str) -> str:
    """One segment of a pattern as a regular expression. `*` and `?` match as in file names."""
    return re.escape(segment).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")


def matches(pattern: str, path: str) -> bool:
    if not pattern:
        return not path
    return glob(pattern).fullmatch(f"{path}." if path else "") is not None
