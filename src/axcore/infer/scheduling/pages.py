"""The pages of a paged cache: which are free, which hold the tokens of a row, and which are kept for other prompts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from axcore.config import ConfigError

type PrefixKey = bytes
"""Identifies a full page by all tokens from the start of the row to the end of the page, and by what else determines
their keys and values."""


class PageUsage(NamedTuple):
    """The number of pages in each state. They sum to the size of the pool.

    Attributes:
        live: pages of at least one row.
        cached: published pages of no row. A request with the same prefix can use them, and any other can evict them.
        free: the rest.
    """

    live: int
    cached: int
    free: int


class PagePool:
    """Allocates the pages of a paged cache, and finds pages that already hold the prefix of a prompt.

    A page may belong to several rows, which only read it: the pool publishes full pages only, and no row writes into a
    full page. A published page that its last row releases stays cached until its memory is needed. The least recently
    used pages are evicted first, and of one row its last page first, since a page can be found only through its
    predecessors.

    Args:
        num_pages: the number of pages.
        page_size: the number of tokens in a page.
        shares_prefixes: whether rows can share pages. False for a model with other state than paged caches, unless
            that state is saved (`PrefixStates`).

    Attributes:
        epoch: the number of times that `flush` was called. It is part of every key.
        on_evict: called with a cached page and its key before the page is used for other tokens.
    """

    def __init__(self, num_pages: int, page_size: int, *, shares_prefixes: bool = True):
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ConfigError(f"PagePool.{name} must be at least 1, not {value}. Give the cache more memory")
        self.num_pages, self.page_size, self.shares_prefixes = num_pages, page_size, shares_prefixes
        self.epoch = 0
        self.on_evict: Callable[[int, PrefixKey], None] | None = None
        self._users = [0] * num_pages
        self._num_live = 0
        self._free = list(reversed(range(num_pages)))  # a stack whose top is page 0
        self._keys: list[PrefixKey | None] = [None] * num_pages
        self._published: dict[PrefixKey, int] = {}
        self._unused: dict[int, None] = {}  # cached pages, the least recently used first

    @property
    def usage(self) -> PageUsage:
        """The number of pages in each state."""
        return PageUsage(self._num_live, len(self._unused), len(self._free))

    @property
    def num_available(self) -> int:
        """The number of pages that `allocate` can return."""
        return len(self._free) + len(self._unused)

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Pages for a new user, who may write them. Evicts cached pages if too few are free."""
        assert 0 <= count <= self.num_available, f"{count} pages requested, {self.num_available} available"
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        self.retain(pages)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a user to each page."""
        for page in pages:
            if not self._users[page]:
                self._num_live += 1
                self._unused.pop(page, None)
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes a user from each page of a row, given in the order of the row."""
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} is released more often than it was retained"
            self._users[page] -= 1
            if not self._users[page]:
                self._num_live -= 1
                if self._keys[page] is None:
                    self._free.append(page)
                else:
                    self._unused[page] = None

    def extend(self, keys: list[PrefixKey], tokens: Sequence[int], *, salt: str, adapter: str | None) -> None:
        """Appends the keys of the full pages of a row that `keys` does not contain yet.

        Each key is a 256-bit hash of its predecessor and of the tokens of the page. The predecessor of the first page
        is a hash of all that determines keys and values besides the tokens.

        Args:
            keys: the keys of the first pages of the row. Keys of an earlier epoch must be removed by the caller.
            tokens: the known tokens of the row.
            salt: rows with different salts share no page.
            adapter: the name and version of the adapter that computes the row.
        """
        if not self.shares_prefixes:
            return
        for start in range(len(keys) * self.page_size, len(tokens) - self.page_size + 1, self.page_size):
            parent = keys[-1] if keys else _hash(b"root", repr((salt, adapter, self.epoch)).encode())
            keys.append(_hash(b"page", parent + array("q", tokens[start : start + self.page_size]).tobytes()))

    def match(self, keys: Iterable[PrefixKey]) -> list[int]:
        """The published pages of the longest prefix. Retain them before the next allocation, which may evict them."""
        pages: list[int] = []
        for key in keys:
            page = self._published.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, page: int, key: PrefixKey) -> None:
        """Makes a full page, whose tokens are written or will be before later steps, available to other rows.

        If another page with the same content was published, the page remains private to its row.
        """
        assert self._users[page] > 0, f"page {page} is published but belongs to no row"
        assert self._keys[page] is None, f"page {page} is published twice"
        if key not in self._published:
            self._published[key] = page
            self._keys[page] = key

    def flush(self) -> None:
        """Forgets all published pages, because the weights changed. Pages in use stay with their rows."""
        self.epoch += 1
        self._free.extend(reversed(self._unused))
        self._unused.clear()
        self._published.clear()
        self._keys = [None] * self.num_pages

    def _evict(self) -> None:
        page = next(iter(self._unused))
        del self._unused[page]
        key, self._keys[page] = self._keys[page], None
        assert key is not None
        del self._published[key]
        self._free.append(page)
        if self.on_evict is not None:
            self.on_evict(page, key)


def _hash(domain: bytes, content: bytes) -> PrefixKey:
    """A hash that differs between domains, so that no page looks like a root."""
    return hashlib.blake2b(content, digest_size=32, person=domain).digest()
