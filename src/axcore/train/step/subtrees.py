"""Subtrees of parameters, and the arrays in other trees that belong to parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.tree_util import KeyPath

from axcore.module import Tree


def subtree[M](tree: Tree, marks: Tree, is_selected: Callable[[M], bool]) -> Tree:
    """The subtree of the leaves whose mark is selected, without empty dicts.

    Args:
        marks: a tree of the same structure, whose leaves are the arguments of `is_selected`.
    """
    found: Tree = {}
    for name, leaf in tree.items():
        mark = marks[name]
        if isinstance(mark, dict):
            if inner := subtree(leaf, mark, is_selected):
                found[name] = inner
        elif is_selected(mark):
            found[name] = leaf
    return found


def union(one: Tree, other: Tree) -> Tree:
    """The union of two subtrees with disjoint leaves."""
    whole = {**one, **other}
    for name in one.keys() & other.keys():
        whole[name] = union(one[name], other[name])
    return whole


def like_params[V](tree: Any, params: Tree, values: Tree, other: V) -> Any:
    """A value for each array of an optimizer or a callback: that of a parameter, or `other`.

    An array belongs to a parameter if its path in `tree` contains the path of the parameter. It has the value of the
    parameter if their shapes are equal.

    Args:
        tree: arrays or shapes.
        params: the parameters, as arrays or shapes.
        values: a value for each parameter, such as its sharding.
        other: the value for all other arrays.
    """
    owned = {
        _names(path): (param.shape, value)
        for (path, param), value in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(values), strict=True)
    }

    def value(path: KeyPath[Hashable], leaf: jax.ShapeDtypeStruct) -> V:
        names = _names(path)
        spans = ((start, end) for start in range(len(names)) for end in range(start + 1, len(names) + 1))
        found = [names[start:end] for start, end in spans if names[start:end] in owned]
        shape, of_param = owned[max(found, key=len)] if found else (None, other)
        return of_param if leaf.shape == shape else other

    return jax.tree.map_with_path(value, tree)


def _names(path: KeyPath[Hashable]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
