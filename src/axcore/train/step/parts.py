"""Splitting a tree of arrays into two and joining them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axcore.module import Tree


def part(tree: Tree, marks: Tree, wanted: Callable[[Any], bool]) -> Tree:
    """The subtree of the leaves whose mark is wanted, without empty dicts.

    Args:
        marks: a tree of the same structure.
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
    """The union of two subtrees with disjoint leaves."""
    whole = {**one, **other}
    for name in one.keys() & other.keys():
        whole[name] = joined(one[name], other[name])
    return whole
