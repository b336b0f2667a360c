"""Loads tensors from disk as the arrays of a model, one tensor at a time."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axcore.config import AxcoreError, did_you_mean
from axcore.config.tree import matches as is_like
from axcore.nn import by_layer
from axcore.train.checkpoint.state_layout import listed
from axcore_hf.family import Family, Match, choose, matches
from axcore_hf.sources import Source, is_ignored
from axcore_hf.transforms import Array
from axcore_hf.vocabulary import padded, unpadded_shapes

Forms = Mapping[str, jax.ShapeDtypeStruct]


def load(
    family: Family,
    theirs: Any,
    source: Source,
    ours: Any,
    params: Forms,
    state: Forms,
    allow_new: Collection[str] = (),
) -> dict[str, jax.Array]:
    """Loads the arrays of a model from a checkpoint.

    Args:
        theirs: the config that the checkpoint describes.
        ours: the config of the model to load for. Its layers may be stacked differently.
        params, state: shape, dtype and sharding of its parameters and of its other Variables, by path.
        allow_new: globs of parameters that the checkpoint may lack.

    Raises:
        AxcoreError: tensors are missing, unknown or of another shape. The message lists all of them with both names.
    """
    forms = {**state, **params}
    places = by_layer(ours, forms)
    unpadded = unpadded_shapes(ours, forms)
    shapes = {name: unpadded[path][len(index) :] for name, (path, index) in places.items()}
    chosen = [choose(candidates, source.shapes.keys()) for candidates in matches(family, theirs, shapes)]
    may_lack = {name for name, (path, _) in places.items() if any(is_like(glob, path) for glob in allow_new)}
    chosen = [match for match in chosen if _is_there(match, source) or not may_lack.issuperset(match.ours)]
    _check(family, source, chosen, {name for name, (path, _) in places.items() if path in params} - may_lack)
    arrays: dict[str, jax.Array] = {}
    broken: list[str] = []
    for match in chosen:
        for number, inner, part in match.rule.transform.pieces(source.read, match.theirs, match.shapes):
            path, index = places[match.ours[number]]
            index = (*index, *inner)
            if not jnp.issubdtype(part.dtype, jnp.floating):
                raise AxcoreError(
                    f"{source.where}: {match.theirs[0]} has the dtype {part.dtype}, but weights must be floating-point"
                )
            if not np.isfinite(part).all():
                tensor = match.theirs[inner[0]] if len(match.theirs) > 1 and inner else match.theirs[0]
                broken.append(f"{tensor} (parameter {match.ours[number]})")
            elif not index:
                arrays[path] = _placed(padded(part, forms[path].shape), forms[path].dtype, forms[path].sharding)
            else:
                arrays[path] = _written(arrays.get(path), forms[path], part, index)
    if broken:
        raise AxcoreError(f"{source.where} has values that are not finite:{listed(broken)}")
    return arrays


def _placed(part: Array, dtype: Any, sharding: Any) -> jax.Array:
    """Places the array on its devices. The host converts the dtype of one device's piece at a time."""
    if sharding is None:
        return jax.device_put(np.asarray(part, dtype))
    return jax.make_array_from_callback(part.shape, sharding, lambda piece: np.asarray(part[piece], dtype))


def _written(whole: jax.Array | None, form: jax.ShapeDtypeStruct, part: Array, index: tuple[int, ...]) -> jax.Array:
    """Writes one layer or expert into the stack `whole`, whose buffer is donated. None creates the stack."""
    sharding = form.sharding
    if whole is None:
        make = functools.partial(jnp.zeros, form.shape, form.dtype)
        whole = make() if sharding is None else jax.jit(make, out_shardings=sharding)()
    of_part = None
    if isinstance(sharding, NamedSharding):
        of_part = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[len(index) :]))
    placed = _placed(part, form.dtype, of_part)
    written: jax.Array = _writer(sharding)(whole, placed, np.asarray(index, np.int32))
    return written


@functools.lru_cache(maxsize=256)
def _writer(sharding: Any) -> Any:
    def write(whole: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
        start = [*index, *[0] * part.ndim]
        return jax.lax.dynamic_update_slice(whole, part.reshape((1,) * index.size + part.shape), start)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def _is_there(match: Match, source: Source) -> bool:
    return any(name in source.shapes for name in match.theirs)


def _check(family: Family, source: Source, chosen: list[Match], wanted: set[str]) -> None:
    """Raises an `AxcoreError` that lists all problems with the checkpoint's tensors."""
    known = {name for match in chosen for name in match.theirs}
    extra = [name for name in source.shapes if name not in known and not is_ignored(name, family.ignored)]
    wrong: list[str] = []
    for match in chosen:
        ours = ", ".join(match.ours)
        for name, shape in match.expected().items():
            if name not in source.shapes:
                near = did_you_mean(name, extra)
                wrong.append(f"missing: {name} (parameter {ours}){near and '.' + near}")
            elif source.shapes[name] != shape:
                wrong.append(f"wrong shape: {name} (parameter {ours}) is {source.shapes[name]}, expected {shape}")
    covered = {name for match in chosen for name in match.ours}
    wrong += [f"no tensor is known for parameter {name}" for name in sorted(wanted - covered)]
    wrong += [f"unknown: {name} {source.shapes[name]}" for name in sorted(extra)]
    if wrong:
        raise AxcoreError(f"{source.where} does not have the tensors of {family.name}:{listed(wrong)}")
