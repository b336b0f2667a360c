"""Splitting a tree of arrays into two subtrees, and joining them."""

from __future__ import annotations

from collections.abc import Callable

from axcore.module import Tree


def part[M](tree: Tree, marks: Tree, is_wanted: Callable[[M], bool]) -> Tree:
    """The subtree of the leaves whose mark is wanted, without empty dicts.

    Args:
        marks: a tree of the same structure, whose leaves are the arguments of `is_wanted`.
    """
    found: Tree = {}
    for name, leaf in tree.items():
        mark = marks[name]
        if isinstance(mark, dict):
            if inner := part(leaf, mark, is_wanted):
                found[name] = inner
        elif is_wanted(mark):
            found[name] = leaf
    return found


def joined(one: Tree, other: Tree) -> Tree:
    """The union of two subtrees with disjoint leaves."""
    whole = {**one, **other}
    for name in one.keys() & other.keys():
        whole[name] = joined(one[name], other[name])
    return whole
