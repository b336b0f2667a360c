"""A state pytree as a checkpoint stores it: one flat table of named arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from axcore.config import AxcoreError

SHOWN = 8
"""Mismatches that one error spells out."""


class ArrayLike(Protocol):
    """An array, or the description of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


Layout = Mapping[str, tuple[str, Sequence[int]]]
"""Path -> (dtype, shape) of every array."""


def named_leaves(tree: PyTree) -> dict[str, ArrayLike]:
    """Path -> leaf, such as `params.decoder.norm.scale`.

    The path comes from keys, attribute names and indices alone, so that a dict, a dataclass and a NamedTuple with the
    same names store alike: a container type may change without breaking old checkpoints.

    Raises:
        AxcoreError: two leaves share a path, or one is not an array.
    """
    named: dict[str, ArrayLike] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        if path in named:
            raise AxcoreError(f"two arrays of the state are both called {path!r}; rename one of the keys")
        if not _is_array(leaf):
            raise AxcoreError(f"{path} of the state is a {type(leaf).__name__}; a checkpoint holds arrays only")
        named[path] = leaf
    return named


def layout(named: Mapping[str, ArrayLike]) -> dict[str, tuple[str, list[int]]]:
    """The dtype and shape of each array, in a form that JSON keeps."""
    return {path: (str(leaf.dtype), list(leaf.shape)) for path, leaf in named.items()}


def mismatches(saved: Layout, wanted: Mapping[str, ArrayLike], *, subset: bool, cast: bool) -> list[str]:
    """How a stored state differs from the wanted one, a line for each path. Empty when it fits.

    Args:
        subset: stored arrays that are not wanted are no mismatch.
        cast: another floating-point dtype is no mismatch.
    """
    found = []
    for path, leaf in wanted.items():
        if path not in saved:
            found.append(f"{path}: not in the checkpoint")
            continue
        dtype, shape = saved[path]
        same_dtype = dtype == str(leaf.dtype) or (
            cast and _is_float(dtype) and jnp.issubdtype(leaf.dtype, jnp.floating)
        )
        if not same_dtype or tuple(shape) != tuple(leaf.shape):
            held, asked = _shown(dtype, shape), _shown(str(leaf.dtype), leaf.shape)
            found.append(f"{path}: the checkpoint has {held}, expected {asked}")
            continue
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None:
            try:
                sharding.shard_shape(tuple(leaf.shape))
            except ValueError as error:
                found.append(f"{path}: {str(error).splitlines()[0]}")
    if not subset:
        found += [f"{path}: only in the checkpoint" for path in saved if path not in wanted]
    return found


def listed(found: Sequence[str]) -> str:
    """The first few mismatches, and how many more there are."""
    lines = list(found[:SHOWN])
    if len(found) > SHOWN:
        lines.append(f"... and {len(found) - SHOWN} more")
    return "".join(f"\n  {line}" for line in lines)


def _is_array(leaf: object) -> TypeGuard[ArrayLike]:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_float(dtype: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:  # of a PRNG key
        return False


def _shown(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
