"""PRNG keys derived from paths, so that adding a layer does not change the keys of its siblings."""

from __future__ import annotations

import dataclasses
import hashlib
import numbers
from typing import TYPE_CHECKING

import jax
from jaxtyping import Array, Int, PRNGKeyArray

from axcore.config import ConfigError

if TYPE_CHECKING:
    from flax import nnx


def fold(key: PRNGKeyArray, name: str | int | Int[Array, ""]) -> PRNGKeyArray:
    """Derives the key for `name` from `key`. The name "3" and a traced 3 give the same key, so that a layer draws the
    same bits in a scanned and in an unrolled stack."""
    if isinstance(name, str):
        is_number = name.isdecimal() and len(name) < 10 and str(int(name)) == name  # not "03", which differs from "3"
        name = int(name) if is_number else int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return jax.random.fold_in(key, name)


@dataclasses.dataclass(frozen=True)
class Rngs:
    """The source of random numbers of a layer's constructor: a key and the path of the layer.

    `axcore.Rngs(0)` is the root of a tree.
    """

    key: PRNGKeyArray
    path: str = ""
    _used: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)  # paths whose keys are used
    _building: bool = dataclasses.field(default=False, compare=False, repr=False)  # whether a constructor received them

    def __init__(self, key: PRNGKeyArray | int, path: str = ""):
        object.__setattr__(self, "key", jax.random.key(key) if isinstance(key, numbers.Integral) else key)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "_used", set())
        object.__setattr__(self, "_building", False)

    def at(self, name: str) -> Rngs:
        """The rngs of a child or a parameter."""
        below = Rngs(fold(self.key, name), f"{self.path}.{name}" if self.path else name)
        object.__setattr__(below, "_used", self._used)
        object.__setattr__(below, "_building", self._building)
        return below

    def index(self, index: Int[Array, ""]) -> Rngs:
        """The rngs of one layer of a stack, with the path of the stack."""
        return Rngs(fold(self.key, index), self.path)

    def fresh(self) -> Rngs:
        """The same rngs, none of whose keys are used."""
        return Rngs(self.key, self.path)

    def for_constructor(self) -> Rngs:
        """The rngs that a constructor receives: fresh ones, unless another constructor passes its own, so a layer
        cannot build two children from the same keys."""
        if self._building:
            return self
        given = self.fresh()
        object.__setattr__(given, "_building", True)
        return given

    def use(self) -> Rngs:
        """These rngs. The key of each path may be used once in a constructor.

        Raises:
            ConfigError: The key is used already, so two children or parameters would start with equal values.
        """
        if self.path in self._used:
            raise ConfigError(
                f"{self.path or 'the root'}: two children or parameters of this name would start with equal values, "
                f"since the name determines the random numbers. Give each its own name, as in self.child(name, ...)"
            )
        self._used.add(self.path)
        return self

    def nnx(self) -> nnx.Rngs:
        """The rngs for a plain `nnx.Module`. For a second module, take those of another name: `rngs.at(name).nnx()`.

        Raises:
            ConfigError: The rngs of this name are used already.
        """
        from flax import nnx

        return nnx.Rngs(self.use().key)
