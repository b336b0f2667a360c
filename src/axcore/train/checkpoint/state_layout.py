"""The layout of a state pytree in a checkpoint: a flat table of named arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from axcore.config import AxcoreError

SHOWN = 8
"""Number of entries that `listed` shows."""


class ArrayLike(Protocol):
    """An array, or the description of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


Layout = Mapping[str, tuple[str, Sequence[int]]]
"""(dtype, shape) of every array, by path."""


def named_leaves(tree: PyTree) -> dict[str, ArrayLike]:
    """Leaves by path, such as `params.decoder.norm.scale`.

    The path depends only on keys, attribute names and indices. A dict, a dataclass and a NamedTuple with the same names
    have the same layout, so a container type can change without breaking old checkpoints.

    Raises:
        AxcoreError: two leaves share a path, or a leaf is not an array.
    """
    named: dict[str, ArrayLike] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        if path in named:
            raise AxcoreError(f"two arrays of the state have the path {path!r}. Rename one of the keys.")
        if not _is_array(leaf):
            raise AxcoreError(f"{path} of the state is a {type(leaf).__name__}. A checkpoint can store only arrays.")
        named[path] = leaf
    return named


def layout(named: Mapping[str, ArrayLike]) -> dict[str, tuple[str, list[int]]]:
    """The dtype and shape of each array, as JSON values."""
    return {path: (str(leaf.dtype), list(leaf.shape)) for path, leaf in named.items()}


def mismatches(saved: Layout, wanted: Mapping[str, ArrayLike], *, subset: bool, cast: bool) -> list[str]:
    """Differences between the stored state and the wanted one, one line per path. Empty if it fits.

    Args:
        subset: allow stored arrays that are not wanted.
        cast: allow another floating-point dtype.
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
    """The first entries, one per line, and the number of further ones."""
    lines = list(found[:SHOWN])
    if len(found) > SHOWN:
        lines.append(f"... and {len(found) - SHOWN} more")
    return "".join(f"\n  {line}" for line in lines)


def _is_array(leaf: object) -> TypeGuard[ArrayLike]:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_float(dtype: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:  # the dtype of a PRNG key
        return False


def _shown(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
