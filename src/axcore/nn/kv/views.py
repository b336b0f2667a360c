"""Views of keys and values in memory. Caches return them, and kernels read them."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from axcore.nn.tokens import TokenInfo


class KVView:
    """Base of views. A view is a pytree; each memory layout, such as pages or quantized codes, is a subclass.

    A kernel lists the views that it reads in place; for other views the core calls `gathered`. The reference kernel
    reads every view through `block`, so only one block of keys exists as plain arrays at a time.

    Attributes:
        tokens: position and validity of each key.
    """

    tokens: TokenInfo

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, kv_seq, kv_head, head_dim) of the keys."""
        raise NotImplementedError

    @property
    def value_dim(self) -> int:
        """Features of a value."""
        raise NotImplementedError

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of the arrays that `block` returns."""
        raise NotImplementedError

    def block(self, start: Int[Array, ""] | int, size: int) -> Contiguous:
        """`size` keys, values and tokens from `start` on. `start + size` is at most `kv_seq`."""
        raise NotImplementedError

    def axes(self) -> Self:
        """The view with each array replaced by a `PartitionSpec` of its logical axes."""
        raise NotImplementedError

    def gathered(self) -> Contiguous:
        """All keys and values as plain arrays."""
        return self.block(0, self.shape[1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Contiguous(KVView):
    """Keys and values in plain arrays."""

    k: Float[Array, "batch kv_seq kv_head head_dim"]
    v: Float[Array, "batch kv_seq kv_head value_dim"]
    tokens: TokenInfo

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.k.shape  # type: ignore[return-value]

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1]

    @property
    def dtype(self) -> DTypeLike:
        return self.k.dtype

    def block(self, start: Int[Array, ""] | int, size: int) -> Contiguous:
        if size == self.shape[1]:
            return self
        k, v = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (self.k, self.v))
        return Contiguous(k, v, self.tokens.part(start, size))

    def axes(self) -> Contiguous:
        names = _spec("batch", "kv_seq", "kv_head", None)
        return Contiguous(names, names, token_axes(self.tokens, "kv_seq"))

    def gathered(self) -> Contiguous:
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InCache(KVView):
    """Rows of cache arrays that also contain other layers of a scanned stack, or other rows.

    Slicing out one layer would copy its whole cache; `block` copies one block.

    Attributes:
        k, v: the arrays of the cache; leading axes run over stacked layers.
        layer: index on those leading axes; empty if there are none.
        slots: the row of the cache for each row of the batch; None: all rows, in order.
    """

    k: Float[Array, "*layer slots kv_seq kv_head head_dim"]
    v: Float[Array, "*layer slots kv_seq kv_head value_dim"]
    tokens: TokenInfo
    layer: tuple[Int[Array, ""], ...] = ()
    slots: Int[Array, " batch"] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows = self.k.shape[len(self.layer)] if self.slots is None else self.slots.shape[0]
        return (rows, *self.k.shape[len(self.layer) + 1 :])  # type: ignore[return-value]

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1]

    @property
    def dtype(self) -> DTypeLike:
        return self.k.dtype

    def block(self, start: Int[Array, ""] | int, size: int) -> Contiguous:
        def cut(x: jax.Array) -> jax.Array:
            lead = len(self.layer)
            first = (*self.layer, 0, start, *(0,) * (x.ndim - lead - 2))
            sizes = (*(1,) * lead, x.shape[lead], size, *x.shape[lead + 2 :])
            found = jax.lax.dynamic_slice(x, first, sizes).reshape(sizes[lead:])
            return found if self.slots is None else found[self.slots]

        return Contiguous(cut(self.k), cut(self.v), self.tokens.part(start, size))

    def axes(self) -> InCache:
        names = _spec(*(None,) * len(self.layer), "batch", "kv_seq", "kv_head", None)
        layer = (_spec(),) * len(self.layer)
        slots = None if self.slots is None else _spec("batch")
        return InCache(names, names, token_axes(self.tokens, "kv_seq"), layer, slots)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Latent(KVView):
    """Keys whose first features are also the values, as in multi-head latent attention with absorbed weights.

    Attributes:
        keys: any view; its values are ignored.
        rank: number of leading features of a key that form the value.
    """

    keys: KVView
    rank: int = dataclasses.field(metadata={"static": True})

    @property
    def tokens(self) -> TokenInfo:  # type: ignore[override]
        return self.keys.tokens

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.keys.shape

    @property
    def value_dim(self) -> int:
        return self.rank

    @property
    def dtype(self) -> DTypeLike:
        return self.keys.dtype

    def block(self, start: Int[Array, ""] | int, size: int) -> Contiguous:
        found = self.keys.block(start, size)
        return Contiguous(found.k, found.k[..., : self.rank], found.tokens)

    def axes(self) -> Latent:
        return Latent(self.keys.axes(), self.rank)


def token_axes(tokens: TokenInfo, seq: str) -> TokenInfo:
    """`tokens` with each array replaced by its logical axes; an array with a single row has no `batch` axis."""

    def names(x: jax.Array) -> PartitionSpec:
        return PartitionSpec("batch" if x.shape[0] > 1 else None, seq, *(None,) * (x.ndim - 2))

    return jax.tree.map(names, dataclasses.replace(tokens, cached=None))


def _spec(*axes: str | None) -> Any:
    """A `PartitionSpec`, typed `Any` because it takes the place of an array."""
    return PartitionSpec(*axes)


def empty_values(k: Float[Array, "*shape head_dim"]) -> Float[Array, "*shape 0"]:
    """Values with zero features, for a cache that stores keys only."""
    return jnp.zeros((*k.shape[:-1], 0), k.dtype)
