"""The sequences that run, with their slots and pages."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from axcore.infer.scheduling.host_pool import HostPool
from axcore.infer.scheduling.pages import PagePool, PrefixKey
from axcore.infer.scheduling.prefix_states import PrefixStates
from axcore.infer.sequences import Sequence


class CachedPrefix(NamedTuple):
    """The pages that hold the first tokens of a sequence.

    Attributes:
        pages: pages of the device.
        host_pages: the pages in host memory after them.
        missing: the keys of the first pages that are not on the device, and nowhere.
        num_found: the number of pages that hold the first tokens, with or without a saved state at their end.
    """

    pages: list[int]
    host_pages: list[int]
    missing: frozenset[PrefixKey] = frozenset()
    num_found: int = 0


class Rows:
    """The sequences that run. Each has a slot, and pages for all of its tokens.

    Args:
        max_rows: the number of slots.
        pool: the pages.
        watermark: the share of the pages that starting sequences leave to those that run.
        host: decoding state outside of the device.
        states: the saved states of rows; None: all state is in pages, or rows share no prefixes.
    """

    def __init__(
        self, max_rows: int, pool: PagePool, watermark: float, host: HostPool, states: PrefixStates | None = None
    ):
        self.pool, self.host, self.states = pool, host, states
        self._watermark = int(watermark * pool.num_pages)
        self._slots = list(range(max_rows))  # a heap, so that the slots in use are low
        self._running: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._running.values()))

    @property
    def num_free(self) -> int:
        """The number of slots that no sequence has."""
        return len(self._slots)

    @property
    def last(self) -> Sequence:
        """The running sequence that is the last in rank: the newest of the lowest priority."""
        return max(self._running.values(), key=Sequence.rank)

    def lookup(self, sequence: Sequence) -> CachedPrefix:
        """The cached pages of a sequence that does not run.

        They leave out the last token, which must be computed for its logits. A sequence whose request asks for the
        log-probabilities of the prompt, or for the mean of its hidden states, uses no cached pages, since it needs the
        results of all tokens. One with saved state needs no other pages of the host. If rows have state that is not in
        pages, the cached pages end where it was saved.
        """
        if sequence.epoch != self.pool.epoch:
            sequence.keys, sequence.epoch = [], self.pool.epoch
        if sequence.request.options.prompt_logprobs or sequence.request.pooling == "mean":
            return CachedPrefix([], [])
        self._extend_keys(sequence)
        keys = sequence.keys[: (len(sequence.tokens) - 1) // self.pool.page_size]
        cached = self.pool.match(keys)
        if sequence.saved is not None:
            if self.states is not None:  # the row continues after `num_computed` tokens
                cached = cached[: sequence.num_computed // self.pool.page_size]
            return CachedPrefix(cached, [])
        kept = self.host.match(keys[len(cached) :])
        ends = {len(cached), len(cached) + len(kept)}
        missing = frozenset(keys[end] for end in ends if end < len(keys))
        num_found = len(cached) + len(kept)
        if self.states is not None:
            count = self.states.match(keys[:num_found])
            cached, kept = cached[:count], kept[: max(count - len(cached), 0)]
        return CachedPrefix(cached, kept, missing, num_found)

    def start(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """Gives a sequence a slot and pages, if enough are free.

        Alone, every sequence fits. Otherwise, it leaves the watermark to the others.
        """
        cached, kept = prefix.pages, prefix.host_pages
        self.pool.retain(cached)
        missing = self.pool.pages_for(sequence.length) - len(cached)
        if not self._slots or missing + (self._watermark if self._running else 0) > self.pool.num_available:
            self.pool.release(cached)
            return False
        sequence.slot, has_saved = heapq.heappop(self._slots), sequence.saved is not None
        with self.host.retained(kept):  # pages that are evicted now must not replace them
            sequence.pages = cached + self.pool.allocate(missing)
            sequence.num_published = len(cached)
            sequence.num_computed = self.host.restore(sequence, len(cached), kept)
        if self.states is not None:
            if sequence.num_computed and not has_saved:
                number = self.states.use(sequence.keys[len(cached) + len(kept) - 1])
                self.host.load(sequence, number)
            self._set_boundaries(sequence, prefix.num_found)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        self._running[sequence.id] = sequence
        return True

    def grow(self, sequence: Sequence, num_drafts: int = 0) -> bool:
        """Gives a running sequence the pages for its next token and for drafts after it, if enough are free."""
        missing = self.pool.pages_for(sequence.length + num_drafts) - len(sequence.pages)
        if missing > self.pool.num_available:
            return False
        sequence.pages += self.pool.allocate(max(missing, 0))
        return True

    def shrink(self, sequence: Sequence) -> None:
        """Releases the pages of drafts that were rejected."""
        needed = self.pool.pages_for(sequence.length)
        self.pool.release(sequence.pages[needed:])
        del sequence.pages[needed:]

    def publish(self, sequence: Sequence) -> None:
        """Publishes pages whose tokens are known and computed by dispatched steps, and saves the state at a
        boundary."""
        self._extend_keys(sequence)
        num_full = min(sequence.num_computed // self.pool.page_size, len(sequence.keys))
        for at in range(sequence.num_published, num_full):
            self.pool.publish(sequence.pages[at], sequence.keys[at])
        sequence.num_published = max(sequence.num_published, num_full)
        if self.states is not None and sequence.num_computed in sequence.boundaries:
            sequence.boundaries.remove(sequence.num_computed)
            if (number := self.states.save(sequence.keys[num_full - 1])) is not None:
                self.host.save(sequence, number)

    def release(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence."""
        assert sequence.slot is not None, f"sequence {sequence.id} does not run"
        del self._running[sequence.id]
        heapq.heappush(self._slots, sequence.slot)
        self.pool.release(sequence.pages)
        sequence.slot, sequence.pages = None, []

    def _set_boundaries(self, sequence: Sequence, num_found: int) -> None:
        """Where the state of a row that starts is saved: after its last full page, for rows that continue it, and after
        the pages that an earlier row has computed, too, for rows that share only these."""
        size = self.pool.page_size
        ends = {num_found * size, (len(sequence.tokens) - 1) // size * size}
        sequence.boundaries = sorted(end for end in ends if end > sequence.num_computed)

    def _extend_keys(self, sequence: Sequence) -> None:
        adapter = None if sequence.adapter is None else sequence.adapter.key
        self.pool.extend(sequence.keys, sequence.tokens, salt=sequence.request.salt, adapter=adapter)
