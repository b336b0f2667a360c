"""Paths through a config tree: walking, reading and replacing nodes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from axcore.config.errors import ConfigError, did_you_mean
from axcore.config.history import History
from axcore.config.node import Config, FrozenDict, field_names, fields

NESTING = (Config, tuple, FrozenDict)
"""What can hold nodes. Concrete classes: `isinstance` of an abstract one is ten times slower."""

REMOVED: Any = object()
"""In place of a node: take it out."""


def join(path: str, name: str | int) -> str:
    return f"{path}.{name}" if path else str(name)


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """(segment, value) of what lies directly below: a node's fields, a tuple's items, a mapping's entries."""
    if isinstance(value, Config):
        yield from fields(value)
    elif isinstance(value, tuple):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, FrozenDict):
        yield from value.items()


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Config]]:
    """Every (path, node) of a tree, parents first. The root's path is `""`."""
    if isinstance(value, Config):
        yield path, value
    for name, part in parts(value):
        if isinstance(part, NESTING):
            yield from walk(part, join(path, name))


def get(root: Config, path: str) -> Any:
    """The node or value at a path such as `model.decoder.layers.attention.num_heads`.

    Raises:
        ConfigError: nothing is there; the nearest path is suggested.
    """
    value: Any = root
    for name in path.split(".") if path else ():
        below = dict(parts(value))
        if name not in below:
            raise no_such_path(root, path)
        value = below[name]
    return value


def history(root: Config, path: str) -> History:
    """What `Config.history` returns: the node's own events, and those of its parent that put it there."""
    value, names = get(root, path), path.split(".") if path else []
    events = [*value.__dict__.get("_history", ())] if isinstance(value, Config) else []
    # The nearest node above holds the value in one of its fields, maybe inside a tuple or mapping.
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
    if not hint:  # a right name in the wrong place is the commonest slip
        same = [other for other in known if other.rpartition(".")[2] == leaf]
        hint = f" Did you mean {same[0]!r}?" if same else ""
    return ConfigError(f"the config has no {path!r}.{hint}")


def put(value: Any, path: str, new: Any) -> Any:
    """A copy of the tree with `new` at `path`, which must exist unless it is a new key of a mapping."""
    if not path:
        return new
    name, _, rest = path.partition(".")
    below = dict(parts(value))
    if name not in below and not (isinstance(value, Mapping) and not rest):
        raise ConfigError(f"nothing at {name!r}")
    return rebuild(value, {name: put(below.get(name), rest, new)})


def rebuild(value: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of a node, tuple or mapping with some of its parts replaced."""
    if isinstance(value, Config):
        return value._with({name: None if new is REMOVED else new for name, new in changes.items()})
    if isinstance(value, tuple):
        items = (changes.get(str(index), item) for index, item in enumerate(value))
        return tuple(item for item in items if item is not REMOVED)
    return FrozenDict({key: item for key, item in {**value, **changes}.items() if item is not REMOVED})


def transform(value: Any, edit: Callable[[str, Config], Any], path: str = "") -> Any:
    """Applies `edit` to every node, children first. What nothing changed is shared with the old tree, not copied.

    An edit may return `REMOVED`: the node then goes from its tuple or mapping, and its field becomes None.
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
    """A path pattern: `*` matches within one segment, `**` any number of segments (also none)."""
    steps = []
    for segment in pattern.split("."):
        steps.append(r"(?:[^.]+\.)*" if segment == "**" else _segment(segment) + r"\.")
    return re.compile("".join(steps))


def _segment(segment: str) -> str:
    """One segment of a pattern as a regular expression: `*` and `?` as in file names."""
    return re.escape(segment).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")


def matches(pattern: str, path: str) -> bool:
    if not pattern:
        return not path
    return glob(pattern).fullmatch(f"{path}." if path else "") is not None
