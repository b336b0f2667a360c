"""The identity of a model, by which engines tell whether they have the same weights."""

from __future__ import annotations

import functools
import hashlib

import jax
import numpy as np
from jaxtyping import Array, Shaped

from axcore.config import flatten
from axcore.module import Layer, functional
from axcore.train.run.identity import is_layout, layout_fields


class ModelIdentity:
    """Identifies a model: a hash of what its config computes, and of the shape and the first values of each parameter.

    Kernels, caches and meshes do not change it. Models that differ in later values only have the same identity.
    """

    def __init__(self, model: Layer):
        params = jax.tree.leaves_with_path(functional(model)[1])
        self._config, self._name = model.config, type(model).__name__
        self._forms = [f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}" for path, leaf in params]
        # The weights may be freed before the identity is needed. This program is all that every engine pays for it.
        self._first = _first_values([leaf for _, leaf in params if leaf.ndim and leaf.size])

    @functools.cached_property
    def text(self) -> str:
        """The hash."""
        fields = layout_fields(self._config)
        parts = [f"{path}={text}" for path, text in flatten(self._config).items() if not is_layout(path, fields)]
        digest = hashlib.blake2b("\n".join([self._name, *sorted(parts), *self._forms]).encode(), digest_size=8)
        for values in jax.device_get(self._first):
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()


@jax.jit
def _first_values(leaves: list[Shaped[Array, ...]]) -> list[Shaped[Array, " values"]]:
    return [leaf[(0,) * (leaf.ndim - 1)][:4] for leaf in leaves]
