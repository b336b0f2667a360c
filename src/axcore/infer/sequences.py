"""The state of a sample between steps, and the tokens of it that a step computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Literal

from axcore.infer.loaded_adapters import LoadedAdapter
from axcore.infer.requests import FinishReason, Request
from axcore.infer.scheduling.pages import PrefixKey


@dataclasses.dataclass(frozen=True)
class SavedState:
    """The decoding state of a sequence that waits, outside of the device.

    Attributes:
        pages: pages in host memory, in the order of the row; empty without pages.
        slot: the slot in host memory; None: rows have no state in slots.
        handover: the state from another engine, instead of pages and a slot. The scheduler passes it on unread.
    """

    pages: tuple[int, ...] = ()
    slot: int | None = None
    handover: object = None


class Sequence:
    """One sample of a request. The scheduler changes it; others only read it.

    Args:
        id: a number that no other sequence of the scheduler has.
        request: what the caller asks for.
        eos_ids: the tokens that end a sample of the model.

    Attributes:
        tokens: the prompt and the output that is known, including an EOS token.
        num_computed: the number of tokens that steps have computed or were given to compute. Drafts count when they are
            accepted.
        num_pending: the number of tokens that steps will surely sample and whose ids are unknown.
        is_verified: whether a step in flight verifies drafts, so that its number of tokens is unknown until then.
        num_cached: the number of tokens that were in the cache when the sequence was first admitted; None: it was not.
        slot: its slot in the decoding state, while it runs.
        pages: its page table, while it runs and pages are in use.
        keys: the keys of its known full pages, for the weights of `epoch`.
        num_published: the number of its pages that were published, or are not published because others are.
        boundaries: numbers of tokens after which its state is saved, ascending. A chunk of it ends there.
        max_len: the number of tokens at which it ends; set by `Scheduler.add`.
        arrival: its number in the order of `Scheduler.add`.
        saved: its decoding state outside of the device, while it waits with `num_computed` tokens; None: it has none.
        is_exported: whether its state is read when its next token is being sampled, for another engine.
        needs_last_token: whether its last token must be known before its next step is planned, so that the host cannot
            plan one step ahead.
        finish_reason: why it ended; None: it has not.
        adapter: the adapter that computes it; None: the model alone.
    """

    def __init__(self, id: int, request: Request, eos_ids: Collection[int] = ()):
        self.id, self.request = id, request
        self.tokens = list(request.ids)
        self.num_computed = self.num_pending = 0
        self.is_verified = False
        self.num_cached: int | None = None
        self.slot: int | None = None
        self.pages: list[int] = []
        self.keys: list[PrefixKey] = []
        self.num_published = self.epoch = 0
        self.boundaries: list[int] = []
        self.max_len = self.arrival = 0
        self.saved: SavedState | None = None
        self.is_exported = self.needs_last_token = False
        self.finish_reason: FinishReason | None = None
        self.adapter: LoadedAdapter | None = None
        self._stop_token_ids = request.options.all_stop_token_ids(eos_ids)

    @property
    def output(self) -> list[int]:
        """The known output, including an EOS token."""
        return self.tokens[len(self.request.ids) :]

    @property
    def num_output(self) -> int:
        """The number of known output tokens."""
        return len(self.tokens) - len(self.request.ids)

    @property
    def length(self) -> int:
        """The number of tokens, including those whose ids are unknown."""
        return len(self.tokens) + self.num_pending

    @property
    def is_complete(self) -> bool:
        """Whether its last token is being sampled, so that no step needs to compute more of it."""
        return self.length >= self.max_len

    @property
    def is_decoding(self) -> bool:
        """Whether all of its tokens but the last are computed."""
        return 0 < self.num_computed == self.length - 1

    def rank(self) -> tuple[int, int]:
        """Sequences of a smaller rank run first."""
        return self.request.priority, self.arrival

    def extend(self, tokens: Iterable[int]) -> int:
        """Adds sampled tokens until the sequence ends, and sets `finish_reason` if it does.

        Returns:
            The number of added tokens. Those after the end are dropped.
        """
        before = len(self.tokens)
        for token in tokens:
            may_stop = self.num_output >= self.request.options.min_tokens
            self.tokens.append(token)
            if may_stop and token in self._stop_token_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_len:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return len(self.tokens) - before

    def drop(self, count: int) -> None:
        """Removes the last `count` tokens of a sequence that ends before them."""
        del self.tokens[len(self.tokens) - count :]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a sequence that one step computes.

    Attributes:
        sequence: the sequence. Its slot and pages are valid until the scheduler is called again.
        start: the position of the first token.
        count: the number of tokens, with the drafts.
        is_last: whether the chunk has the last token of the sequence, so that the step samples the next one.
        ids: the tokens; empty if the chunk is the one token that the previous step samples.
        num_drafts: the number of tokens at the end of the chunk that are drafts. They follow the last token of the
            sequence, and the step samples the token after each of them, too.
    """

    sequence: Sequence
    start: int
    count: int
    is_last: bool
    ids: tuple[int, ...]
    num_drafts: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether the chunk is the last token of a sequence whose other tokens are computed, perhaps with drafts, and
        whose output is sampled."""
        is_last = self.start > 0 and self.count == 1 + self.num_drafts and self.is_last
        return is_last and self.sequence.request.pooling is None


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A copy of decoding state, before the step of its plan.

    Attributes:
        kind: `offload` copies from the device to host memory, and `restore` back; `export` reads the state of a
            sequence for another engine, and `import` writes such a state. `save` copies a slot to a saved state, and
            `load` back.
        pages: the pages of the device.
        host_pages: the same number of pages in host memory; empty in exports and imports.
        slot: the slot of the device; None: pages only.
        host_slot: the slot in host memory; None: pages only, an export or an import.
        sequence: the sequence whose whole state is exported, imported or restored; None: only the pages of a prefix.
        handover: what an import writes.
        first_page: the index of `pages[0]` in the row.
        num_tokens: the number of computed tokens of the sequence.
        state: the number of the state that is saved or loaded.
    """

    kind: Literal["offload", "restore", "export", "import", "save", "load"]
    pages: tuple[int, ...] = ()
    host_pages: tuple[int, ...] = ()
    slot: int | None = None
    host_slot: int | None = None
    sequence: Sequence | None = None
    handover: object = None
    first_page: int = 0
    num_tokens: int = 0
    state: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The work of one step. It may have transfers only.

    Attributes:
        prefill: chunks of prompts, and of sequences that are computed again.
        decode: the last tokens of sequences whose other tokens are computed, with their drafts.
        number: the number of plans before this one.
        transfers: copies of decoding state that run before the chunks, in this order.
    """

    prefill: tuple[Chunk, ...]
    decode: tuple[Chunk, ...]
    number: int
    transfers: tuple[Transfer, ...] = ()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.decode + self.prefill

    @property
    def is_read_first(self) -> bool:
        """Whether its results must be read before the next step is planned."""
        return any(chunk.is_last and chunk.sequence.needs_last_token for chunk in self.chunks)
