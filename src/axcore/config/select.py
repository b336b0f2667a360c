"""Selections of nodes in a config tree. Edits are pure: each returns a new tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator

from axcore.config.codec import same, shown
from axcore.config.errors import ConfigError, did_you_mean
from axcore.config.history import event, raised_at
from axcore.config.node import REQUIRED, Config, default, fields, has_field, shown_type, type_name
from axcore.config.tree import REMOVED, matches, transform, walk

Where = str | type | Callable[[str, Config], bool]
"""What to select: a path glob, a Layer or Config class (subclasses match too), or a predicate of (path, node)."""


@dataclasses.dataclass(frozen=True)
class Selection[C: Config]:
    """One or more nodes of a tree. Edits return the root of a new tree."""

    root: C
    paths: tuple[str, ...]

    def __iter__(self) -> Iterator[tuple[str, Config]]:
        chosen = set(self.paths)
        return ((path, node) for path, node in walk(self.root) if path in chosen)

    def __len__(self) -> int:
        return len(self.paths)

    def map(self, edit: Callable[[str, Config], object]) -> C:
        """Replaces each selected node with `edit(path, node)`, which must be a config.

        Raises:
            ConfigError: The new node does not fit. The message begins with the path.
        """
        chosen = set(self.paths)
        return transform(self.root, lambda path, node: edited(path, node, edit) if path in chosen else node)

    def set(self, **values: object) -> C:
        """Sets fields on each selected node."""
        return self.map(lambda _, node: node.set(**values))

    def put(self, **slots: Config | None) -> C:
        """Fills slots of each selected node and keeps wrappers, see `Config.put`."""
        return self.map(lambda _, node: node.put(**slots))

    def swap(self, new: Config, *, keep: Collection[str] = (), drop: Collection[str] = ()) -> C:
        """Replaces each selected node with `new`.

        Args:
            new: The replacement.
            keep: Fields to carry over from the old node.
            drop: Fields of the old node to discard even if they are set.

        Raises:
            ConfigError: A field that is set on the old node is in neither `keep` nor `drop`.
        """
        return self.map(lambda _, old: _swapped(old, new, keep, drop))

    def wrap(self, wrapper: Config, slot: str) -> C:
        """Wraps each selected node: `wrapper` replaces the node and holds it in the field `slot`."""
        return self.map(lambda _, node: wrapper.set(**{slot: node}))

    def remove(self) -> C:
        """Removes each selected node from its tuple or mapping, or sets its field to None.

        Raises:
            ConfigError: The field of a node does not accept None.
        """
        return self.map(lambda _, __: REMOVED)

    def insert(self, field: str, *new: Config, at: int | None = None) -> C:
        """Adds nodes to the tuple `field` of each selected node: before index `at`, or at the end."""

        def edit(_: str, node: Config) -> Config:
            held = getattr(node, field)
            if not isinstance(held, tuple):
                raise ConfigError(f"insert requires a tuple, but {field} is {type(held).__name__}")
            cut = len(held) if at is None else at
            return node.set(**{field: (*held[:cut], *new, *held[cut:])})

        return self.map(edit)


def select[C: Config](root: C, where: Where, *, expect: int | None = None) -> Selection[C]:
    """The nodes of `root` that match `where`.

    Raises:
        ConfigError: No node matches, or not exactly `expect` nodes.
    """
    if isinstance(where, str):
        found = [path for path, _ in walk(root) if matches(where, path)]
    elif isinstance(where, type):
        found = [path for path, node in walk(root) if builds(node, where)]
    elif callable(where):
        found = [path for path, node in walk(root) if where(path, node)]
    else:
        raise ConfigError(f"where={where!r} must be a pattern, a class, or a function of a path and a node")
    if not found:
        raise ConfigError(f"nothing in the config matches {_shown(where)}.{_nearest(root, where)}")
    if expect is not None and len(found) != expect:
        raise ConfigError(f"{_shown(where)} matches {len(found)} nodes, expected {expect}: {', '.join(found)}")
    return Selection(root, tuple(found))


def edited(path: str, node: Config, edit: Callable[[str, Config], object]) -> object:
    """`edit(path, node)`, checked to be a config. The history of the new node records the type that it replaced."""
    try:
        new = edit(path, node)
    except ConfigError as error:
        raise ConfigError(f"at {path or 'the root'}: {error}") from error
    except AttributeError as error:  # the edit uses a field that this node does not have
        raise ConfigError(f"at {path or 'the root'}: {error} ({raised_at(error)})") from error
    if new is not REMOVED and not isinstance(new, Config):
        raise ConfigError(f"at {path or 'the root'}: the edit returned {shown(new)}, not a config")
    if isinstance(new, Config) and type(new) is not type(node):
        new = new._with({}, event(f"in place of {shown_type(type(node))}"))
    return new


def tagged(tag: str) -> Callable[[str, Config], bool]:
    """A predicate for nodes whose `tags` contain this tag: `select(cfg, tagged("frozen"))`."""
    return lambda _, node: tag in node.__dict__.get("tags", ())


def builds(node: Config, cls: type) -> bool:
    """Whether a node is an instance of `cls`, or builds `cls` or a subclass of it."""
    return isinstance(node, cls) or (node.target is not None and issubclass(node.target, cls))


def _swapped(old: Config, new: Config, keep: Collection[str], drop: Collection[str]) -> Config:
    for name in (*keep, *drop):
        if not has_field(old, name):
            raise ConfigError(f"{shown_type(type(old))} has no field {name!r}.{did_you_mean(name, old.__dict__)}")
    kept = {name: getattr(old, name) for name in keep}
    lost = []
    for name, value in fields(old):
        is_set = value is not REQUIRED and not same(value, default(type(old), name))
        given_anew = name in new.__dict__ and not same(new.__dict__[name], default(type(new), name))
        if is_set and name not in kept and name not in drop and not given_anew:
            lost.append(f"{name}={shown(value)}")
    if lost:
        raise ConfigError(
            f"swapping {shown_type(type(old))} for {shown_type(type(new))} would lose {', '.join(lost)}; "
            f"pass each in keep= or drop="
        )
    return new.set(**kept)


def _shown(where: Where) -> str:
    return repr(where) if isinstance(where, str) else getattr(where, "__qualname__", repr(where))


def _nearest(root: Config, where: Where) -> str:
    if isinstance(where, str):
        above, _, name = where.rpartition(".")
        if any(matches(above, path) and getattr(node, name, ...) is None for path, node in walk(root)):
            return f" It is an empty slot: select {above!r} and set {name}=..."
        return did_you_mean(where, (path for path, _ in walk(root) if path))
    names = sorted({type_name(type(node)).rpartition(".")[2] for _, node in walk(root)})
    return f" It contains: {', '.join(names)}."
