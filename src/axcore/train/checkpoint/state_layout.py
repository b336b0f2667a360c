"""A state pytree as a checkpoint stores it: one flat table of named arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.config import AxcoreError

Layout = Mapping[str, Any]
"""path -> (dtype, shape) of every array, as JSON keeps it."""

SHOWN = 8
"""Mismatches that one error spells out."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """path -> leaf, such as `params.decoder.norm.scale`.

    The path comes from keys, attribute names and indices alone, so that a dict, a dataclass and a NamedTuple
    with the same names store alike: a container type may change without breaking old checkpoints.

    Raises:
        AxcoreError: two leaves share a path, or one is not an array.
    """
    named: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        if path in named:
            raise AxcoreError(f"two arrays of the state are both called {path!r}; rename one of the keys")
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise AxcoreError(f"{path} of the state is a {type(leaf).__name__}; a checkpoint holds arrays only")
        named[path] = leaf
    return named


def layout(named: Mapping[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """What each array looks like, in a form that JSON keeps."""
    return {path: (str(leaf.dtype), list(leaf.shape)) for path, leaf in named.items()}


def mismatches(saved: Layout, wanted: Mapping[str, Any], *, subset: bool) -> list[str]:
    """How a stored state differs from the wanted one, a line for each path. Empty when it fits."""
    found = []
    for path, leaf in wanted.items():
        if path not in saved:
            found.append(f"{path}: not in the checkpoint")
            continue
        dtype, shape = saved[path]
        if (dtype, tuple(shape)) != (str(leaf.dtype), tuple(leaf.shape)):
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


def listed(found: list[str]) -> str:
    """The first few mismatches, and how many more there are."""
    lines = found[:SHOWN]
    if len(found) > SHOWN:
        lines.append(f"... and {len(found) - SHOWN} more")
    return "".join(f"\n  {line}" for line in lines)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key array, or describes one."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def stored(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays to write: PRNG keys as their integers, and none of zero size (some formats refuse those)."""
    return {
        path: jax.random.key_data(leaf) if is_key(leaf) else leaf for path, leaf in named.items() if np.prod(leaf.shape)
    }


def abstract_stored(wanted: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """`stored` of a state that is to be read. What names no sharding goes where jax puts new arrays."""
    return {path: _abstract(leaf) for path, leaf in wanted.items() if np.prod(leaf.shape)}


def restored(wanted: Mapping[str, Any], read: Mapping[str, Any]) -> list[Any]:
    """The leaves of the wanted state, in its order."""
    leaves = []
    for path, leaf in wanted.items():
        if path not in read:
            leaves.append(jax.device_put(np.zeros(leaf.shape, leaf.dtype), _sharding(leaf)))
        elif is_key(leaf):
            leaves.append(jax.random.wrap_key_data(read[path], impl=_impl(leaf)))
        else:
            leaves.append(read[path])
    return leaves


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = _sharding(leaf)
    if not is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _sharding(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None:
        return sharding
    return jnp.zeros(()).sharding


def _impl(leaf: Any) -> Any:
    found = []  # key_impl takes arrays and tracers, not a ShapeDtypeStruct
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return found[0]


def _shown(dtype: str, shape: Any) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
