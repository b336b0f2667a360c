"""A KV cache in pages, as in PagedAttention (Kwon et al. 2023, arXiv 2309.06180)."""

from __future__ import annotations

import jax.numpy as jnp

import axcore as ax
from axcore.module import ContextError
from axcore.nn import ArrayCache, AttentionInputs, KVCache, Paged, Paging


class PagedCache(ArrayCache):
    """Stores keys and values in a pool of pages [num_pages, page_size, kv_head, head_dim] that all rows share.

    The page tables of a step, `axcore.infer.Step.pages`, assign pages to rows. Rows may share pages that they only
    read. Tokens of padding, tokens with a negative index and tokens without a page are not stored.

    A pool is the same on all devices that shard rows; `kv_head` may be sharded.
    """

    class Config(ArrayCache.Config):
        page_size: ax.PositiveInt = 16
        """Tokens in a page."""
        num_pages: ax.PositiveInt | None = None
        """Pages in the pool; None: enough for `batch_size` rows of `max_len` tokens."""
        batch_size: ax.PositiveInt = ax.REQUIRED
        max_len: ax.PositiveInt = ax.REQUIRED
        """Largest number of tokens in a row. Later tokens are not stored."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> PagedCache.Config:
            return self.set(batch_size=batch_size, max_len=max_len)

        @property
        def paging(self) -> Paging:
            """See `KVCache`."""
            per_row = -(-self.max_len // self.page_size)
            return Paging(self.page_size, self.batch_size * per_row if self.num_pages is None else self.num_pages)

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs  # no parameters
        self.allocate((cfg.paging.num_pages, cfg.page_size), ("page", None))

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs:
        """See `KVCache`. Returns a `Paged` view.

        Raises:
            ContextError: the cached rows have no page tables.
        """
        rows, paging = self.rows(inputs), self.config.paging
        if rows.pages is None:
            raise ContextError(f"{self.frame.describe()} requires page tables; call it through axcore.infer.Decoder")
        size = min(self.config.max_len, rows.pages.shape[1] * paging.page_size)
        _, place = self.places(inputs, size)
        column = jnp.minimum(place, size - 1) // paging.page_size
        page = jnp.take_along_axis(rows.pages, column, axis=1)
        page = jnp.where(place < size, page, paging.num_pages)  # out of range, so the write is dropped
        self.write((page, place % paging.page_size), inputs.plain)
        k, v, layer, scales, read_as = self.arrays
        tokens = rows.tokens.part(0, size)
        return inputs.replace(kv=Paged(k, v, rows.pages, tokens, rows.lengths, layer, scales, read_as))
