"""The size of the pool of paged KV caches, and page tables."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int
from numpy.typing import ArrayLike

from axcore.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Paging:
    """The pool of pages that all rows of a decoder share. Every paged cache of a model has a pool of this size.

    Attributes:
        page_size: tokens in a page.
        num_pages: pages in the pool. As an entry of a page table, it means an unused entry.
    """

    page_size: int
    num_pages: int

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def own_pages(self, slots: Int[Array, " batch"], max_len: int) -> Int[Array, "batch pages_per_row"]:
        """Page tables in which each slot has its own pages, in order, for rows of `max_len` tokens."""
        count = self.pages_for(max_len)
        return slots[:, None] * count + jnp.arange(count, dtype=jnp.int32)

    def complete(
        self, table: Int[Array, "batch pages_per_row"], lengths: Int[Array, " batch"]
    ) -> Bool[Array, " batch"]:
        """Whether a table has a page of the pool for every token of its row that has an entry in the table."""
        unused = jnp.arange(table.shape[1]) * self.page_size >= lengths[:, None]
        return (unused | ((table >= 0) & (table < self.num_pages))).all(axis=1)

    def check(self, table: Int[ArrayLike, "batch pages_per_row"], start: ArrayLike, lengths: ArrayLike) -> None:
        """Checks the page tables of a step on the host.

        Args:
            table: the pages of each row.
            start: the position of the first new token of each row, [batch].
            lengths: the number of new tokens of each row, [batch].

        Raises:
            ConfigError: a row has more tokens than its table has room for, an entry that it needs is not a page of the
                pool, or it writes to a page that has another use in the step.
        """
        table, start = np.asarray(table), np.asarray(start)
        end = start + np.asarray(lengths)
        needed = [row[: max(self.pages_for(int(stop)), 0)].tolist() for row, stop in zip(table, end, strict=True)]
        users: dict[int, int] = {}
        for index, pages in enumerate(needed):
            if end[index] > table.shape[1] * self.page_size:
                raise ConfigError(
                    f"Step.pages[{index}] has {table.shape[1]} pages of {self.page_size} tokens, but the row has "
                    f"{end[index]} tokens; pass a wider table"
                )
            for column, page in enumerate(pages):
                if not 0 <= page < self.num_pages:
                    raise ConfigError(
                        f"Step.pages[{index}, {column}] is {page}, but must be a page from 0 to {self.num_pages - 1}, "
                        f"since the row has {end[index]} tokens"
                    )
                users[page] = users.get(page, 0) + 1
        for index, pages in enumerate(needed):
            for column in range(max(int(start[index]), 0) // self.page_size, len(pages)):
                if users[pages[column]] > 1:
                    raise ConfigError(
                        f"Step.pages[{index}, {column}]: the row writes to page {pages[column]}, which occurs "
                        f"{users[pages[column]]} times in the tables of the step. Rows may share only pages that they "
                        f"do not write to"
                    )
