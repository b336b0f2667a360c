"""A config tree as text, and the difference between two trees."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from axcore.config.codec import render
from axcore.config.frozen import FrozenDict
from axcore.config.node import Config, type_name
from axcore.config.tree import join, parts


def text(root: Config) -> str:
    """The tree as lines `path: value` in declaration order. The value of a node is its type."""
    return "".join(f"{path}: {value}\n" for path, value in flatten(root).items())


def flatten(root: Config) -> dict[str, str]:
    """A mapping from path to value as text. The value of a node is its type; the path of the root is `.`."""
    found: dict[str, str] = {}
    _flatten(root, "", found)
    return found


def parse_text(content: str) -> dict[str, str]:
    """Splits the lines that `text` writes into a mapping from path to value as text."""
    return dict(line.split(": ", 1) for line in content.split("\n") if ": " in line)


def _flatten(value: object, path: str, found: dict[str, str]) -> None:
    if isinstance(value, Config):
        found[path or "."] = type_name(type(value))
    elif not (isinstance(value, tuple | FrozenDict) and any(isinstance(part, Config) for _, part in parts(value))):
        found[path] = render(value)
        return
    for name, part in parts(value):
        _flatten(part, join(path, name), found)


@dataclasses.dataclass(frozen=True)
class Change:
    """One line of a difference. `old` or `new` is None if the path exists on one side only."""

    path: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        if self.old is None:
            return f"+ {self.path}: {self.new}"
        if self.new is None:
            return f"- {self.path}: {self.old}"
        return f"~ {self.path}: {self.old} -> {self.new}"


class Diff(tuple[Change, ...]):
    """The changes between two trees. Its text has one line per change."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no difference"


def diff(old: Config, new: Config) -> Diff:
    """The changes from `old` to `new`: values, class swaps, additions and removals."""
    return diff_flat(flatten(old), flatten(new))


def diff_flat(old: Mapping[str, str], new: Mapping[str, str]) -> Diff:
    """`diff` of two flattened trees, such as one that `parse_text` read from a file."""
    paths = dict.fromkeys([*old, *new])
    changed = [Change(path, old.get(path), new.get(path)) for path in paths if old.get(path) != new.get(path)]
    return Diff([*changed, *_reordered(old, new)])


def _reordered(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    """The change of the first mapping of nodes whose keys have another order."""
    for one, other in zip((path for path in old if path in new), (path for path in new if path in old), strict=True):
        if one != other:
            pairs = zip(one.split("."), other.split("."), strict=False)
            above = [name for name, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
            holder = ".".join(above)
            if holder not in old:  # a mapping of nodes has no line of its own
                yield Change(holder, _keys(old, above), _keys(new, above))
            return


def _keys(flat: Mapping[str, str], above: list[str]) -> str:
    """The keys of the mapping at a path, in order."""
    names = (path.split(".") for path in flat)
    return ", ".join(dict.fromkeys(name[len(above)] for name in names if name[: len(above)] == above))
