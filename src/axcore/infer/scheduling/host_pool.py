"""Decoding state that leaves the device for host memory, and comes back: preempted sequences and evicted prefixes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

from axcore.infer.scheduling.pages import PagePool, PrefixKey
from axcore.infer.sequences import SavedState, Sequence, Transfer


@dataclasses.dataclass(frozen=True)
class HostLimits:
    """The decoding state that host memory has room for.

    Attributes:
        num_pages: the number of pages; 0: none, or the caches have no pages.
        num_slots: the number of rows whose state is in slots; None: rows have no such state.
        offloads_preempted: whether preempted sequences are copied to the host instead of being computed again.
    """

    num_pages: int = 0
    num_slots: int | None = None
    offloads_preempted: bool = False


class HostPool:
    """Allocates host memory for decoding state, and plans the copies between it and the device.

    Host memory holds the pages of preempted sequences and, if pages are shared, copies of prefixes that were evicted
    from the pool of the device. The least recently used prefixes make room for new pages.

    The copies of a plan run in their order, after the steps dispatched before and before the step of the plan.
    Therefore pages and slots on both sides are free for another use as soon as a copy is planned.

    Args:
        limits: the size of host memory.
        pool: the pages of the device.
        is_paged: whether the device has pages; otherwise `pool` only counts slots.

    Attributes:
        pages: the pages in host memory; None if there are none.
        num_offloaded: how often a preempted sequence was copied to the host.
    """

    def __init__(self, limits: HostLimits, pool: PagePool, *, is_paged: bool):
        self.limits, self.num_offloaded = limits, 0
        self.pages: PagePool | None = None
        self._pool, self._is_paged = pool, is_paged
        self._slots = None if limits.num_slots is None else list(reversed(range(limits.num_slots)))
        self._transfers: list[Transfer] = []
        if is_paged and limits.num_pages:
            self.pages = PagePool(limits.num_pages, pool.page_size, shares_prefixes=pool.shares_prefixes)
            pool.on_evict = self._evicted

    @property
    def num_free_slots(self) -> int:
        """The number of slots in host memory that no sequence has."""
        return len(self._slots or ())

    @property
    def has_transfers(self) -> bool:
        """Whether copies wait for the next plan."""
        return bool(self._transfers)

    def take(self) -> tuple[Transfer, ...]:
        """The copies since the last call, in their order."""
        taken, self._transfers = tuple(self._transfers), []
        return taken

    def match(self, keys: Iterable[PrefixKey]) -> list[int]:
        """The pages in host memory of the longest prefix."""
        return [] if self.pages is None else self.pages.match(keys)

    @contextlib.contextmanager
    def retained(self, pages: list[int]) -> Iterator[None]:
        """Keeps some pages in host memory for as long as the context lasts."""
        if self.pages is not None:
            self.pages.retain(pages)
        yield
        if self.pages is not None:
            self.pages.release(pages)

    def offload(self, sequence: Sequence) -> bool:
        """Copies the state of a running sequence to the host, if there is room for it."""
        if not self.limits.offloads_preempted or not sequence.num_computed or self._slots == []:
            return False
        pages = self._copied_pages(sequence) if self._is_paged else []
        if pages is None:
            return False
        host_slot = None if self._slots is None else self._slots.pop()
        if host_slot is not None:
            self._transfers.append(Transfer("offload", slot=sequence.slot, host_slot=host_slot))
        sequence.saved = SavedState(tuple(pages), host_slot)
        self.num_offloaded += 1
        return True

    def restore(self, sequence: Sequence, num_cached: int, prefix: list[int]) -> int:
        """Copies state to the slot and the pages of a sequence that starts.

        Args:
            sequence: the sequence. Its saved state, if any, is used up.
            num_cached: the number of its pages on the device that hold a shared prefix.
            prefix: the pages in host memory after them, of a sequence without saved state.

        Returns:
            The number of tokens that need not be computed.
        """
        saved = sequence.saved
        if saved is None:
            pages = tuple(sequence.pages[num_cached : num_cached + len(prefix)])
            if pages:
                self._transfers.append(Transfer("restore", pages, tuple(prefix)))
            return (num_cached + len(prefix)) * self._pool.page_size
        num_saved = self._pool.pages_for(sequence.num_computed) if self._is_paged else 0
        self._transfers.append(
            Transfer(
                "restore" if saved.handover is None else "import",
                tuple(sequence.pages[num_cached:num_saved]),
                saved.pages[num_cached:num_saved],
                slot=sequence.slot,
                host_slot=saved.slot,
                sequence=sequence,
                handover=saved.handover,
                first_page=num_cached,
                num_tokens=sequence.num_computed,
            )
        )
        self.drop(sequence)
        return max(sequence.num_computed, num_cached * self._pool.page_size)

    def drop(self, sequence: Sequence) -> None:
        """Frees the saved state of a sequence, if it has any."""
        saved, sequence.saved = sequence.saved, None
        if saved is None:
            return
        if saved.pages:
            assert self.pages is not None
            self.pages.release(saved.pages)
        if saved.slot is not None:
            assert self._slots is not None
            self._slots.append(saved.slot)

    def export(self, sequence: Sequence) -> None:
        """Reads the state of a sequence whose prompt is computed, for another engine."""
        count = self._pool.pages_for(sequence.num_computed) if self._is_paged else 0
        pages = tuple(sequence.pages[:count])
        self._transfers.append(
            Transfer("export", pages, slot=sequence.slot, sequence=sequence, num_tokens=sequence.num_computed)
        )

    def save(self, sequence: Sequence, number: int) -> None:
        """Copies the slot of a sequence to a saved state, on the device."""
        self._transfers.append(Transfer("save", slot=sequence.slot, state=number))

    def load(self, sequence: Sequence, number: int) -> None:
        """Copies a saved state to the slot of a sequence that starts after `num_computed` tokens."""
        num_tokens = sequence.num_computed
        self._transfers.append(Transfer("load", slot=sequence.slot, state=number, num_tokens=num_tokens))

    def flush(self) -> None:
        """Forgets all prefixes, because the weights changed."""
        if self.pages is not None:
            self.pages.flush()

    def _copied_pages(self, sequence: Sequence) -> list[int] | None:
        """Pages in host memory for the computed tokens of a sequence; None if there is no room. Full pages that are
        there already are shared, and the others are copied."""
        if self.pages is None:
            return None
        keys = sequence.keys
        num_pages, num_full = self._pool.pages_for(sequence.num_computed), sequence.num_computed // self._pool.page_size
        found = self.pages.match(keys[:num_full])
        self.pages.retain(found)
        if num_pages - len(found) > self.pages.num_available:
            self.pages.release(found)
            return None
        new = self.pages.allocate(num_pages - len(found))
        for page, key in zip(new, keys[len(found) : num_full], strict=False):
            self.pages.publish(page, key)
        if new:
            self._transfers.append(Transfer("offload", tuple(sequence.pages[len(found) : num_pages]), tuple(new)))
        return found + new

    def _evicted(self, page: int, key: PrefixKey) -> None:
        """Copies a page of the device that is about to be used for other tokens."""
        pages = self.pages
        if pages is None or not pages.num_available or pages.match([key]):
            return
        new = pages.allocate(1)
        pages.publish(new[0], key)
        pages.release(new)
        last = self._transfers[-1] if self._transfers else None
        if last is not None and last.kind == "offload" and last.slot is None and new[0] not in last.host_pages:
            merged = dataclasses.replace(last, pages=(*last.pages, page), host_pages=(*last.host_pages, *new))
            self._transfers[-1] = merged
        else:
            self._transfers.append(Transfer("offload", (page,), tuple(new)))
