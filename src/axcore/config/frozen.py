"""The forms in which configs store values, which nobody can change: tuples, frozen mappings and read-only arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, NoReturn

from axcore.config.codec import codec_of, digest
from axcore.config.errors import ConfigError

MAX_DEPTH = 100
"""The number of levels of nodes, tuples and mappings in a tree. Comparing, copying or writing much deeper trees exceeds
Python's limit of recursion."""


class Node:
    """Base of `Config`, which this module cannot import."""


def _immutable(self: FrozenDict, *args: object, **kwargs: object) -> NoReturn:
    raise TypeError("a FrozenDict cannot be changed; make a new one: {**old, key: value}")


class FrozenDict(dict[str, Any]):  # Any: the value type depends on the field
    """An immutable, hashable dict. `Mapping` fields of a config are stored as one."""

    __setitem__ = __delitem__ = __ior__ = _immutable
    clear = pop = popitem = setdefault = update = _immutable

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset((key, digest(item)) for key, item in self.items()))  # equality of dicts ignores order

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)


def depth_of(value: object) -> int:
    """The number of levels of a stored value."""
    if isinstance(value, Node):
        depth: int = value.__dict__["_depth"]
        return depth
    items = value if isinstance(value, tuple) else value.values() if isinstance(value, FrozenDict) else None
    return 0 if items is None else 1 + max(map(depth_of, items), default=0)


def frozen(value: object, level: int = 0) -> object:
    """Converts lists to tuples, dicts to FrozenDicts and sets to frozensets, at every depth, and freezes arrays."""
    if isinstance(value, float) and type(value) is not float and not isinstance(value, Enum):
        return float(value)  # of NumPy
    if isinstance(value, (bool, int, float, str, Node)) or value is None:
        return value
    if level > MAX_DEPTH:
        raise ConfigError(f"a value is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list) or type(value) is tuple:
        return tuple(frozen(item, level + 1) for item in value)
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, Node) and not re.fullmatch(r"[\w-]+", str(key)):
                raise ConfigError(
                    f"{key!r} cannot be the key of a node, because keys are part of config paths; "
                    f"use letters, digits, underscores and hyphens"
                )
        return FrozenDict({key: frozen(item, level + 1) for key, item in value.items()})
    codec = codec_of(value)
    return value if codec is None else codec.freeze(value)
