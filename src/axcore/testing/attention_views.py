"""Views of keys and values that a KV cache could hold: pages, int8 codes and rows of a cache of all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from axcore.nn import Contiguous, InCache, KVView, TokenInfo
from axcore.nn.kv.views import token_axes

PAGE = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages(KVView):
    """Pages of plain numbers, or of int8 codes with a scale for each token and head.

    Attributes:
        table: the pages of each row.
        read_as: dtype of the keys and values that `block` returns.
    """

    k: Float[Array, "page slot kv_head head_dim"] | Int8[Array, "page slot kv_head head_dim"]
    v: Float[Array, "page slot kv_head value_dim"] | Int8[Array, "page slot kv_head value_dim"]
    scales: tuple[Float[Array, "page slot kv_head"], Float[Array, "page slot kv_head"]] | None
    table: Int[Array, "batch pages_per_row"]
    tokens: TokenInfo
    read_as: DTypeLike = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        _, slots, kv_heads, head_dim = self.k.shape
        return self.table.shape[0], self.table.shape[1] * slots, kv_heads, head_dim

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1]

    @property
    def dtype(self) -> DTypeLike:
        return self.read_as

    def block(self, start: Int[Array, ""] | int, size: int) -> Contiguous:
        places = start + jnp.arange(size)
        at = self.table[:, places // PAGE], places % PAGE
        k, v = self.k[at], self.v[at]
        if self.scales is not None:
            k, v = (x * scale[at][..., None] for x, scale in zip((k, v), self.scales, strict=True))
        return Contiguous(k.astype(self.read_as), v.astype(self.read_as), self.tokens.part(start, size))

    def axes(self) -> Pages:
        whole: Any = PartitionSpec()  # in place of an array
        rows: Any = PartitionSpec("batch", None)
        scales = None if self.scales is None else (whole, whole)
        return Pages(whole, whole, scales, rows, token_axes(self.tokens, "kv_seq"), self.read_as)


def _in_pages(kv: Contiguous) -> Pages:
    """Pages in the opposite order, one of which no row uses."""
    batch, key_len = kv.k.shape[:2]
    count = batch * key_len // PAGE

    def paged(x: jax.Array) -> jax.Array:
        pages = x.reshape(count, PAGE, *x.shape[2:])[::-1]
        return jnp.concatenate([pages, jnp.ones_like(pages[:1])])

    table = jnp.arange(count, dtype=jnp.int32)[::-1].reshape(batch, -1)
    return Pages(paged(kv.k), paged(kv.v), None, table, kv.tokens, kv.k.dtype)


def _in_int8_pages(kv: Contiguous) -> Pages:
    """Scales are powers of two, so that a code times its scale is exact in bfloat16."""
    pages = _in_pages(kv)

    def coded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.abs(x.astype(jnp.float32)).max(-1) / 127)))
        return jnp.round(x / scale[..., None]).astype(jnp.int8), scale

    (k, k_scale), (v, v_scale) = coded(pages.k), coded(pages.v)
    return dataclasses.replace(pages, k=k, v=v, scales=(k_scale, v_scale))


def _in_cache(kv: Contiguous) -> InCache:
    """The second of three layers, with the rows in slots 2 and 0 of 4."""
    slots = jnp.asarray([2, 0], jnp.int32)
    k, v = (jnp.zeros((3, 4, *x.shape[1:]), x.dtype).at[1, slots].set(x) for x in (kv.k, kv.v))
    return InCache(k, v, kv.tokens, (jnp.int32(1),), slots)


VIEWS: dict[str, Callable[[Contiguous], KVView]] = {
    "pages": _in_pages,
    "int8 pages": _in_int8_pages,
    "rows of a cache": _in_cache,
}
"""Memory layout -> the function that stores the keys and values of two rows in it."""
