"""Continuous batching: which tokens of which sequences the next step computes."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from types import MappingProxyType

from axcore.config import ConfigError
from axcore.infer.loaded_adapters import LoadedAdapter
from axcore.infer.requests import FinishReason, Request
from axcore.infer.scheduling.host_pool import HostLimits, HostPool
from axcore.infer.scheduling.limits import SchedulerLimits
from axcore.infer.scheduling.pages import PagePool
from axcore.infer.scheduling.plan_builder import PlanBuilder
from axcore.infer.scheduling.prefix_states import PrefixStates
from axcore.infer.scheduling.rows import CachedPrefix, Rows
from axcore.infer.sequences import Plan, Sequence

LONGEST_WAIT = 4
"""For how many steps of a burst in a row sequences that decode wait."""


class Scheduler:
    """Plans the steps of a device, and records their results, up to one step late.

    ```python
    while not scheduler.is_idle:
        plan = scheduler.plan()
        step = dispatch(plan) if plan else None     # does not wait for the device
        if last:
            ended = scheduler.record(last.plan, fetch(last))
        last = step
    ```

    The device runs steps in the order of dispatch, and each plan is dispatched before the next call of any method.
    Therefore slots and pages are free for another sequence as soon as the host releases them: a step that still uses
    them runs before any step of the next owner.

    Running sequences come first: those that decode, then their drafts, then those whose prompt is partly computed. The
    rest of the step admits waiting sequences. All go by priority and then by arrival, and a sequence is admitted only
    if its whole prompt fits. If the pool has no page for a running sequence, the last one in this order loses its pages
    and waits. It is computed again, or its state is copied to the host and back if that has room. A waiting sequence
    takes the place of running ones only if its priority is higher.

    Steps of a burst (see `SchedulerLimits.burst_tokens`) have prompts only, at most `LONGEST_WAIT` of them in a row if
    a sequence decodes.

    Args:
        limits: the size of the decoding state and of a step.
        pool: the pages of the cache; None: each slot has room for `max_len` tokens.
        host: the size of host memory for decoding state.
        states: the saved states of rows; None: none are saved.

    Attributes:
        num_preempted: how often a sequence lost its row.
        host: decoding state outside of the device.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool | None = None,
        host: HostLimits | None = None,
        states: PrefixStates | None = None,
    ):
        self.limits = limits
        self.max_len = limits.max_len if pool is None else min(limits.max_len, pool.num_pages * pool.page_size)
        self.num_preempted = 0
        # Without pages, a slot is a page that holds a whole row.
        pages = PagePool(limits.max_rows, limits.max_len, shares_prefixes=False) if pool is None else pool
        self.host = HostPool(host or HostLimits(), pages, is_paged=pool is not None)
        self._rows = Rows(limits.max_rows, pages, 0 if pool is None else limits.watermark, self.host, states)
        self._alive: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []  # sorted by rank
        self._is_burst, self._num_waited = False, 0
        self._num_arrived = self._num_planned = self._num_recorded = 0

    @property
    def is_idle(self) -> bool:
        """Whether every sequence has ended and nothing is left to plan. Steps may still be in flight."""
        return not self._alive and not self.host.has_transfers

    @property
    def num_running(self) -> int:
        """The number of sequences that have a row."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """The number of sequences that wait for a row."""
        return len(self._waiting)

    @property
    def adapters(self) -> set[LoadedAdapter]:
        """The adapters of all sequences that have not ended."""
        return {sequence.adapter for sequence in self._alive.values() if sequence.adapter is not None}

    def check(self, request: Request) -> None:
        """Checks that a request fits, even alone. May be called from any thread.

        Raises:
            ConfigError: it cannot fit.
        """
        num_prompt, options = len(request.ids), request.options
        room = self.max_len - num_prompt
        cause = "max_len" if self.max_len == self.limits.max_len else "the size of the page pool"
        limit = f"{self.max_len} tokens ({cause})"
        if room < 1:
            raise ConfigError(
                f"request.ids: a prompt of {num_prompt} tokens leaves no room for output within {limit}. Shorten the "
                f"prompt to at most {self.max_len - 1} tokens"
            )
        for name, value in (("max_tokens", options.max_tokens), ("min_tokens", options.min_tokens)):
            if value is not None and value > room:
                raise ConfigError(
                    f"sampling.{name}={value} and a prompt of {num_prompt} tokens exceed {limit}. Use at most {room}"
                )

    def max_len_of(self, request: Request) -> int:
        """The number of tokens at which a sequence of the request ends."""
        max_tokens = request.options.max_tokens
        return self.max_len if max_tokens is None else len(request.ids) + max_tokens

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            ConfigError: the sequence cannot fit, even alone.
        """
        self.check(sequence.request)
        assert sequence.id not in self._alive, f"two sequences have the id {sequence.id}"
        sequence.max_len = self.max_len_of(sequence.request)
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._alive[sequence.id] = sequence
        bisect.insort(self._waiting, sequence, key=Sequence.rank)

    def cancel(self, id: int, finish_reason: FinishReason = "cancelled") -> bool:
        """Ends a sequence in any state. Tokens of it that are in flight are dropped.

        Args:
            id: the id of the sequence.
            finish_reason: why it ends, such as "stop" after a stop string.

        Returns:
            Whether the sequence had not ended before.
        """
        sequence = self._alive.get(id)
        if sequence is None:
            return False
        sequence.finish_reason = finish_reason
        self._end(sequence)
        return True

    def flush(self) -> None:
        """The weights changed: forgets cached pages, and computes the tokens of running sequences again."""
        self._rows.pool.flush()
        self.host.flush()
        if self._rows.states is not None:
            self._rows.states.flush()
        for sequence in self._waiting:
            if sequence.saved is not None:
                self.host.drop(sequence)
                sequence.num_computed = 0
        for sequence in self._rows:
            self._preempt(sequence, offload=False)

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences whose output is sampled, and whose next step computes their last token, which is known.
        They may have drafts."""
        running = [
            each for each in self._rows if each.is_decoding and not each.num_pending and not self._is_stale(each)
        ]
        return [each for each in running if each.request.pooling is None]

    def plan(self, drafts: Mapping[int, tuple[int, ...]] = MappingProxyType({})) -> Plan | None:
        """The next step; None: nothing can run before results are recorded or a sequence is added.

        Args:
            drafts: tokens that may follow the last token of sequences in `decoding`, by id. The step verifies as many
                as it has room for.
        """
        self._settle()
        num_preempted = self.num_preempted
        self._grow()
        for sequence in self._rows:
            if self._is_stale(sequence) and not sequence.num_pending:
                sequence.num_computed = 0
        num_tokens, usual = self._num_prompt_tokens(), self.limits.step_tokens
        step = PlanBuilder(num_tokens, self.limits, prompts_only=num_tokens > usual)
        self._decode(drafts, step)
        for sequence in self._ready:
            if sequence not in step.counts:
                step.take(sequence)
        self._admit(step, num_preempted)
        if step.prompts_only and num_tokens - step.num_left <= usual:  # no other prompt can start now
            step.prompts_only = False
            self._decode(drafts, step)
        has_waiting = step.prompts_only and any(each.is_decoding for each in self._ready)
        self._num_waited = self._num_waited + 1 if has_waiting else 0
        transfers = self.host.take()
        if not step.counts and not transfers:
            return None
        chunks = step.chunks()
        prefill = tuple(chunk for chunk in chunks if not chunk.is_decode)
        decode = tuple(chunk for chunk in chunks if chunk.is_decode)
        self._num_planned += 1
        return Plan(prefill, decode, self._num_planned - 1, transfers)

    def record(self, plan: Plan, tokens: Mapping[int, tuple[int, ...]]) -> dict[Sequence, int]:
        """Takes the results of a step. Plans are recorded in their order, including those that sample nothing.

        Args:
            plan: the plan of the step.
            tokens: the sampled tokens of each sequence whose chunk is the last, by id: the accepted drafts and the
                token after them. Those of sequences that have ended are ignored.

        Returns:
            The sequences that have new tokens, and their number, without those after the end of a sequence.
        """
        assert plan.number == self._num_recorded, f"plan {plan.number} recorded instead of {self._num_recorded}"
        self._num_recorded += 1
        changed = {}
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if not chunk.is_last or sequence.finish_reason is not None:
                continue
            sampled = tokens[sequence.id]
            assert 0 < len(sampled) <= 1 + chunk.num_drafts, f"sequence {sequence.id} has {len(sampled)} new tokens"
            sequence.num_pending -= 1
            sequence.is_verified = False
            changed[sequence] = sequence.extend(sampled)
            if sequence.slot is not None:  # otherwise, it was preempted or released
                sequence.num_computed += changed[sequence] - 1
            if sequence.finish_reason is not None:
                self._end(sequence)
        return changed

    def _num_prompt_tokens(self) -> int:
        """The number of prompt tokens of the next step."""
        limits = self.limits
        if limits.burst_tokens is None:
            return limits.step_tokens
        ready = [each for each in self._rows if not each.is_decoding] + self._waiting[: self._rows.num_free]
        backlog = sum(each.length - each.num_computed for each in ready)
        self._is_burst = backlog > (limits.step_tokens if self._is_burst else 2 * limits.burst_tokens)
        return limits.burst_tokens if self._is_burst and self._num_waited < LONGEST_WAIT else limits.step_tokens

    def _is_stale(self, sequence: Sequence) -> bool:
        """Whether the computed keys of a sequence are those of a shorter row. It waits until its tokens are known, and
        is computed again in its slot."""
        return 0 < sequence.num_computed < self.limits.first_chunk(sequence.length)

    def _settle(self) -> None:
        """Publishes what the last step computes, and releases what sequences no longer need: the pages of rejected
        drafts, and all of those that surely end."""
        for sequence in self._rows:
            self._rows.publish(sequence)
            if not sequence.is_verified:
                self._rows.shrink(sequence)
            if sequence.is_complete:
                self._release(sequence)

    def _grow(self) -> None:
        """Gives each running sequence the pages for its next token, if necessary those of the last in rank."""
        for sequence in sorted(self._rows, key=Sequence.rank):
            while sequence.slot is not None and not self._rows.grow(sequence):
                self._preempt(self._rows.last)

    @property
    def _ready(self) -> list[Sequence]:
        """The running sequences that a step may compute, by rank; not those that wait for the results of the last."""
        ready = [each for each in self._rows if not each.is_verified and not self._is_stale(each)]
        return sorted(ready, key=Sequence.rank)

    def _decode(self, drafts: Mapping[int, tuple[int, ...]], step: PlanBuilder) -> None:
        """Adds the sequences that decode to a step, then their drafts."""
        decoding = [each for each in self._ready if each.is_decoding]
        for sequence in decoding:
            step.take(sequence)
        for sequence in decoding:
            self._verify(sequence, drafts.get(sequence.id, ()), step)

    def _verify(self, sequence: Sequence, drafts: tuple[int, ...], step: PlanBuilder) -> None:
        """Adds the drafts of a decoding sequence to a step, as far as pages and its maximum length allow. No
        other sequence is preempted for them."""
        if sequence not in step.counts or sequence.num_pending:
            return
        limits = (limit for limit in self.limits.recompute_above if limit >= sequence.length)
        count = min(len(drafts), *(end - sequence.length for end in (sequence.max_len - 1, *limits)))
        while count > 0 and not self._rows.grow(sequence, count):
            count -= 1
        step.verify(sequence, drafts[:count])

    def _admit(self, step: PlanBuilder, num_preempted: int) -> None:
        """Starts waiting sequences in their order, until one does not fit or the step has preempted another."""
        promised = {key for sequence in self._rows for key in sequence.keys[sequence.num_published :]}
        saving = {key for sequence in self._rows for key in self._rows.saving(sequence)}
        num_passed = 0  # a sequence that is passed keeps its claim to a slot
        while step.num_left and num_passed < min(len(self._waiting), max(1, self._rows.num_free)):
            sequence = self._waiting[num_passed]
            if sequence.num_pending or self.num_preempted != num_preempted:
                return  # a preempted sequence waits until its tokens in flight are known
            if self._is_stale(sequence):  # its saved state, of which it has grown out
                self.host.drop(sequence)
                sequence.num_computed = 0
            cached = self._rows.lookup(sequence)
            if cached.missing & promised or cached.unsaved & saving:
                num_passed += 1  # a running sequence computes this page or state, and a later step can share it
            elif self._start(sequence, cached, step):
                del self._waiting[num_passed]
                step.take(sequence)
                promised.update(sequence.keys[sequence.num_published :])
                saving.update(self._rows.saving(sequence))
            else:
                return

    def _start(self, sequence: Sequence, cached: CachedPrefix, step: PlanBuilder) -> bool:
        """Starts a sequence if it fits, if necessary in place of sequences of lower priority."""
        while not self._rows.start(sequence, cached):
            last = self._rows.last
            if last.request.priority <= sequence.request.priority:
                return False
            step.drop(last)
            self._preempt(last)
            cached = self._rows.lookup(sequence)  # its state may have replaced pages in host memory
        return True

    def _preempt(self, sequence: Sequence, *, offload: bool = True) -> None:
        """Takes slot and pages from a running sequence, which waits to come back or to be computed again."""
        if sequence.is_complete:
            self._release(sequence)
            return
        is_offloaded = offload and self.host.offload(sequence)
        self._rows.release(sequence)
        if not is_offloaded:
            sequence.num_computed = 0
        self.num_preempted += 1
        bisect.insort(self._waiting, sequence, key=Sequence.rank)

    def _end(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended in any state."""
        del self._alive[sequence.id]
        if sequence.slot is not None:
            self._rows.publish(sequence)
            if sequence.finish_reason == "cancelled":
                self._rows.release(sequence)
            else:
                self._release(sequence)
            return
        self.host.drop(sequence)
        at = bisect.bisect_left(self._waiting, sequence.rank(), key=Sequence.rank)
        if self._waiting[at : at + 1] == [sequence]:  # otherwise, it was released after its last step
            del self._waiting[at]

    def _release(self, sequence: Sequence) -> None:
        """Takes slot and pages from a sequence that needs no more steps."""
        if sequence.is_exported:
            self.host.export(sequence)
        self._rows.release(sequence)
