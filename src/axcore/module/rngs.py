"""PRNG keys that derive from a path, so that they do not move when a neighbour is added."""

from __future__ import annotations

import dataclasses
import hashlib
import numbers
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from flax import nnx


def fold(key: jax.Array, name: str | int | jax.Array) -> jax.Array:
    """The key of `name` below `key`. A number, spelled or traced, folds in as itself, so that layer 3 of a scanned
    stack and the layer named `3` of an unrolled one draw the same bits."""
    if isinstance(name, str):
        name = int(name) if name.isdecimal() else int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return jax.random.fold_in(key, name)


@dataclasses.dataclass(frozen=True)
class Rngs:
    """What a Layer's constructor draws its parameters from: a key, and the path of the layer being built.

    `axcore.Rngs(0)` starts a tree.
    """

    key: jax.Array
    path: str = ""

    def __init__(self, key: jax.Array | int, path: str = ""):
        object.__setattr__(self, "key", jax.random.key(key) if isinstance(key, numbers.Integral) else key)
        object.__setattr__(self, "path", path)

    def at(self, name: str) -> Rngs:
        """The stream of a child or a parameter."""
        return Rngs(fold(self.key, name), f"{self.path}.{name}" if self.path else name)

    def index(self, index: jax.Array) -> Rngs:
        """The stream of one layer of a stack; the path stays that of the stack."""
        return Rngs(fold(self.key, index), self.path)

    def nnx(self) -> nnx.Rngs:
        """The same stream for a stock `nnx.Module`."""
        from flax import nnx

        return nnx.Rngs(self.key)
