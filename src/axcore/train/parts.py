"""Parts of a tree of arrays: those that one transformation is about, and the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axcore.module import Tree


def part(tree: Tree, marks: Tree, wanted: Callable[[Any], bool]) -> Tree:
    """The leaves whose mark is wanted, in the dicts that hold one.

    Args:
        marks: a tree of the same form.
    """
    found: Tree = {}
    for name, leaf in tree.items():
        mark = marks[name]
        if isinstance(mark, dict):
            if inner := part(leaf, mark, wanted):
                found[name] = inner
        elif wanted(mark):
            found[name] = leaf
    return found


def joined(one: Tree, other: Tree) -> Tree:
    """Two parts of a tree as the whole that they were."""
    whole = {**one, **other}
    for name in one.keys() & other.keys():
        whole[name] = joined(one[name], other[name])
    return whole
