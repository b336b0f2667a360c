"""Views of keys and values in memory. Caches return them, and kernels read them."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from axcore.nn.kv.codes import Scales, decoded
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

    @property
    def codes(self) -> DTypeLike | None:
        """Dtype of the stored codes; None if keys and values are not quantized."""
        return None

    @property
    def page_size(self) -> int | None:
        """Tokens in a page; None if keys and values are not in pages."""
        return None

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


class _InArrays(KVView):
    """A view of the arrays of a cache, which may hold codes."""

    k: jax.Array
    v: jax.Array
    scales: Scales | None
    read_as: DTypeLike | None

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1]

    @property
    def dtype(self) -> DTypeLike:
        return self.k.dtype if self.read_as is None else self.read_as

    @property
    def codes(self) -> DTypeLike | None:
        return None if self.scales is None else self.k.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InCache(_InArrays):
    """Rows of cache arrays that also contain other layers of a scanned stack, or other rows.

    Slicing out one layer would copy its whole cache; `block` copies one block. It returns zeros for keys that are not
    valid, so it never returns NaN that an earlier row left in a slot.

    Attributes:
        k, v: the arrays of the cache, or codes; leading axes run over stacked layers.
        layer: index on those leading axes; empty if there are none.
        slots: the row of the cache for each row of the batch; None: all rows, in order.
        scales: scales of the codes [*layer, slots, kv_seq, kv_head]; None if `k` and `v` are not codes.
        read_as: dtype of decoded codes; None: that of `k`.
    """

    k: Num[Array, "*layer slots kv_seq kv_head head_dim"]
    v: Num[Array, "*layer slots kv_seq kv_head value_dim"]
    tokens: TokenInfo
    layer: tuple[Int[Array, ""], ...] = ()
    slots: Int[Array, " batch"] | None = None
    scales: Scales | None = None
    read_as: DTypeLike | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows = self.k.shape[len(self.layer)] if self.slots is None else self.slots.shape[0]
        return (rows, *self.k.shape[len(self.layer) + 1 :])  # type: ignore[return-value]

    def block(self, start: Int[Array, ""] | int, size: int) -> Contiguous:
        tokens = self.tokens.part(start, size)

        def cut(x: jax.Array) -> jax.Array:
            lead = len(self.layer)
            tail = x.shape[lead + 2 :]

            def of_row(x: jax.Array, slot: tuple[jax.Array, ...], first: jax.Array) -> jax.Array:
                at: list[jax.Array | int] = [*self.layer, *slot, first, *(0 for _ in tail)]
                return jax.lax.dynamic_slice(x, at, (*(1,) * (lead + len(slot)), size, *tail)).reshape(size, *tail)

            # This is a gather. If all rows were one slice, XLA would copy the whole cache into another memory layout.
            firsts = jnp.full(self.shape[:1], start, jnp.int32)
            if self.slots is None:
                found = jax.vmap(of_row, in_axes=(lead, None, 0))(x, (), firsts)
            else:
                found = jax.vmap(of_row, in_axes=(None, 0, 0))(x, (self.slots,), firsts)
            return found if tokens.valid is None else _where(tokens.valid, found)

        k, v = decoded((cut(self.k), cut(self.v)), jax.tree.map(cut, self.scales), self.dtype)
        return Contiguous(k, v, tokens)

    def axes(self) -> InCache:
        names = (*(None,) * len(self.layer), "batch", "kv_seq", "kv_head")
        arrays, layer = _spec(*names, None), (_spec(),) * len(self.layer)
        slots = None if self.slots is None else _spec("batch")
        scales = jax.tree.map(lambda _: _spec(*names), self.scales)
        return InCache(arrays, arrays, token_axes(self.tokens, "kv_seq"), layer, slots, scales, self.read_as)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged(_InArrays):
    """Pages of a pool that all rows share. Page tables list the pages of each row, in order.

    `block` returns zeros for keys that are not valid, so it never returns what another row left in a page.

    Attributes:
        k, v: the pool, or codes; leading axes run over stacked layers.
        table: the pages of each row. An entry that is not used by the tokens of the row may have any value; it is
            usually the number of pages, which is out of range.
        tokens: the tokens of each row, at most `pages_per_row * page_size`.
        lengths: number of valid keys of each row, which are its first.
        layer: index on the leading axes of the pool; empty if there are none.
        scales: scales of the codes [*layer, page, page_size, kv_head]; None if `k` and `v` are not codes.
        read_as: dtype of decoded codes; None: that of `k`.
    """

    k: Num[Array, "*layer page page_size kv_head head_dim"]
    v: Num[Array, "*layer page page_size kv_head value_dim"]
    table: Int[Array, "batch pages_per_row"]
    tokens: TokenInfo
    lengths: Int[Array, " batch"]
    layer: tuple[Int[Array, ""], ...] = ()
    scales: Scales | None = None
    read_as: DTypeLike | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def page_size(self) -> int:
        return self.k.shape[-3]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.table.shape[0], self.tokens.index.shape[1], self.k.shape[-2], self.k.shape[-1]

    def block(self, start: Int[Array, ""] | int, size: int) -> Contiguous:
        page_size, (batch, pages_per_row) = self.page_size, self.table.shape
        # Reads whole pages, since copying them is faster. A block that begins within a page may end in one more.
        is_aligned = isinstance(start, int) and start % page_size == 0
        count = min(-(-size // page_size) + (not is_aligned), pages_per_row)
        first = jnp.minimum(start // page_size, pages_per_row - count)
        pages = jax.lax.dynamic_slice_in_dim(self.table, first, count, axis=1)
        valid = start + jnp.arange(size) < self.lengths[:, None]

        def read(x: jax.Array) -> jax.Array:
            own = len(self.layer) + 2  # the axes that describe a token
            found = x.at[(*self.layer, pages)].get(mode="clip").reshape(batch, count * page_size, *x.shape[own:])
            found = jax.lax.dynamic_slice_in_dim(found, start - first * page_size, size, axis=1)
            return _where(valid, found)

        k, v = decoded((read(self.k), read(self.v)), jax.tree.map(read, self.scales), self.dtype)
        return Contiguous(k, v, self.tokens.part(start, size))

    def axes(self) -> Paged:
        names = (*(None,) * len(self.layer), None, None, "kv_head")
        pool, rows, layer = _spec(*names, None), _spec("batch", None), (_spec(),) * len(self.layer)
        scales = jax.tree.map(lambda _: _spec(*names), self.scales)
        tokens = token_axes(self.tokens, "kv_seq")
        return Paged(pool, pool, rows, tokens, _spec("batch"), layer, scales, self.read_as)


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

    @property
    def codes(self) -> DTypeLike | None:
        return self.keys.codes

    @property
    def page_size(self) -> int | None:
        return self.keys.page_size

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


def _where(
    valid: Bool[Array, "batch_or_1 kv_seq"], x: Num[Array, "batch kv_seq ..."]
) -> Num[Array, "batch kv_seq ..."]:
    """`x` with zeros for keys that are not valid."""
    return jnp.where(jnp.expand_dims(valid, range(2, x.ndim)), x, 0)


def _spec(*axes: str | None) -> Any:
    """A `PartitionSpec`, typed `Any` because it takes the place of an array."""
    return PartitionSpec(*axes)


def empty_values(k: Float[Array, "*shape head_dim"]) -> Float[Array, "*shape 0"]:
    """Values with zero features, for a cache that stores keys only."""
    return jnp.zeros((*k.shape[:-1], 0), k.dtype)
