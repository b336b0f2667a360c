"""Views of keys and values that a KV cache could hold: pages, int8 codes and rows of a cache of all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from axcore.nn import Contiguous, InCache, KVView, Paged

PAGE_SIZE = 4


def _in_pages(kv: Contiguous) -> Paged:
    """Pages in the opposite order, in the second of two layers. NaN is in a page that no row uses, where the tables
    have an entry that is not used, and after the last key of each row."""
    batch, key_len = kv.k.shape[:2]
    count = batch * key_len // PAGE_SIZE
    valid = jnp.full((batch, key_len), True) if kv.tokens.valid is None else kv.tokens.valid

    def paged(x: jax.Array) -> jax.Array:
        pages = jnp.where(valid[..., None, None], x, jnp.nan).reshape(count, PAGE_SIZE, *x.shape[2:])[::-1]
        pages = jnp.concatenate([pages, jnp.full_like(pages[:1], jnp.nan)])
        return jnp.stack([jnp.full_like(pages, jnp.nan), pages])

    table = jnp.arange(count, dtype=jnp.int32)[::-1].reshape(batch, -1)
    unused = jnp.full((batch, 1), count + 1, jnp.int32)
    lengths = valid.sum(axis=1, dtype=jnp.int32)
    table = jnp.concatenate([table, unused], axis=1)
    return Paged(paged(kv.k), paged(kv.v), table, kv.tokens, lengths, (jnp.int32(1),))


def _in_int8_pages(kv: Contiguous) -> Paged:
    """Scales are powers of two, so that a code times its scale is exact in bfloat16. Those of unused places are NaN."""
    pages = _in_pages(kv)

    def coded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.abs(x.astype(jnp.float32)).max(-1) / 127)))
        return jnp.round(x / scale[..., None]).astype(jnp.int8), scale

    (k, k_scale), (v, v_scale) = coded(pages.k), coded(pages.v)
    return dataclasses.replace(pages, k=k, v=v, scales=(k_scale, v_scale), read_as=kv.k.dtype)


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
