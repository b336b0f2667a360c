"""Collects the chunks of a plan, within the size of a step."""

from __future__ import annotations

from axcore.infer.scheduling.limits import SchedulerLimits
from axcore.infer.sequences import Chunk, Sequence


class PlanBuilder:
    """The chunks of a plan under construction.

    Args:
        num_left: the number of prompt tokens that the step may have. A chunk of a prompt takes up a multiple of
            `SchedulerLimits.chunk_multiple` of them.
        limits: the limits of the scheduler.
        prompts_only: whether sequences that decode are left out.

    Attributes:
        num_left: how many more prompt tokens the step may have.
        prompts_only: see above.
        counts: the number of tokens of each sequence, with its drafts.
    """

    def __init__(self, num_left: int, limits: SchedulerLimits, *, prompts_only: bool):
        self.num_left, self.prompts_only = num_left, prompts_only
        self.counts: dict[Sequence, int] = {}
        self._limits = limits
        self._drafts: dict[Sequence, tuple[int, ...]] = {}
        self._taken: dict[Sequence, int] = {}  # of `num_left`

    def take(self, sequence: Sequence) -> None:
        """Adds the last token of a sequence that decodes, or as many tokens of a prompt as there is room for, up to the
        next boundary where its state is saved. Adds nothing if the first chunk does not fit, see
        `SchedulerLimits.first_chunk`, or if the sequence is left out."""
        count = sequence.length - sequence.num_computed
        if sequence.is_decoding and self.prompts_only:
            return
        if not sequence.is_decoding:
            boundary = min(sequence.boundaries, default=sequence.length)
            count, multiple = min(boundary - sequence.num_computed, self.num_left), self._limits.chunk_multiple
            if sequence.num_computed == 0 and count < self._limits.first_chunk(sequence.length):
                return
            self._taken[sequence] = min(self.num_left, -(-count // multiple) * multiple)
            self.num_left -= self._taken[sequence]
        if count:
            self.counts[sequence] = count

    def verify(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Adds drafts after the last token of a sequence."""
        self._drafts[sequence] = drafts
        self.counts[sequence] += len(drafts)

    def drop(self, sequence: Sequence) -> None:
        """Removes a sequence, if it is part of the step."""
        self.counts.pop(sequence, None)
        self.num_left += self._taken.pop(sequence, 0)

    def chunks(self) -> list[Chunk]:
        """The chunks. Their tokens count as computed from now on, and their drafts do not."""
        return [_chunk(sequence, count, self._drafts.get(sequence, ())) for sequence, count in self.counts.items()]


def _chunk(sequence: Sequence, count: int, drafts: tuple[int, ...]) -> Chunk:
    """The next tokens of a sequence, which count as computed from now on, and drafts, which do not."""
    start = sequence.num_computed
    sequence.num_computed += count - len(drafts)
    is_last = sequence.num_computed == sequence.length
    ids = (*sequence.tokens[start : sequence.num_computed], *drafts)
    sequence.num_pending += is_last
    sequence.is_verified = bool(drafts)
    return Chunk(sequence, start, count, is_last, ids, len(drafts))
