"""Wrong schedulers and pools, each with a fault of a real engine, which the checks of the simulation must catch."""

import random

import pytest

from axcore.infer.scheduling.pages import PagePool
from axcore.infer.scheduling.rows import CachedPrefix, Rows
from axcore.infer.scheduling.scheduler import Scheduler
from axcore.infer.sequences import Sequence

from .fake_device import Simulation
from .scenarios import random_scenario


class FreesSharedPages(PagePool):
    def release(self, pages):
        for page in pages:
            self._users[page] = 1
        super().release(pages)


class KeepsKeysOfEvictedPages(PagePool):
    def _evict(self):
        published = dict(self._published)
        super()._evict()
        self._published |= published


class ReplacesPublishedPages(PagePool):
    def publish(self, page, key):
        if key in self._published:
            self._keys[self._published.pop(key)] = None
        super().publish(page, key)
        self._free.append(page)


class KeysWithoutPredecessors(PagePool):
    def extend(self, keys, tokens, *, salt, adapter):
        for at in range(len(keys), len(tokens) // self.page_size):
            keys.append(bytes(tokens[at * self.page_size : (at + 1) * self.page_size]))


class KeysWithoutSalt(PagePool):
    def extend(self, keys, tokens, *, salt, adapter):
        super().extend(keys, tokens, salt="", adapter=adapter)


class KeepsPagesOfOldWeights(PagePool):
    def flush(self):
        pass


class HandsOutCachedPages(PagePool):
    def match(self, keys):
        return super().match(keys) if self.num_available else []

    def retain(self, pages):
        for page in pages:
            self._num_live += not self._users[page]
            self._users[page] += 1  # and it remains evictable


class PublishesBeforeDispatch(Rows):
    def start(self, sequence, cached):
        is_started = super().start(sequence, cached)
        if is_started:
            num_computed, sequence.num_computed = sequence.num_computed, len(sequence.tokens)
            self.publish(sequence)
            sequence.num_computed = num_computed
        return is_started


class PublishesPagesThatAreNotFull(Rows):
    def publish(self, sequence):
        sequence.num_computed += 1
        super().publish(sequence)
        sequence.num_computed -= 1


class SharesThePageOfTheLastToken(Rows):
    def lookup(self, sequence):
        super().lookup(sequence)
        return CachedPrefix(self.pool.match(sequence.keys), [])


class KeepsSlots(Rows):
    def release(self, sequence):
        slot = sequence.slot
        super().release(sequence)
        if len(self._slots) > 1:
            self._slots.remove(slot)


class ResumesWhereItWasPreempted(Scheduler):
    def _preempt(self, sequence, **options):
        num_computed = sequence.num_computed
        super()._preempt(sequence, **options)
        sequence.num_computed = num_computed

    def _start(self, sequence, cached, step):
        num_computed = sequence.num_computed
        is_started = super()._start(sequence, cached, step)
        sequence.num_computed = max(num_computed, sequence.num_computed)
        return is_started


class DropsTokensInFlight(Scheduler):
    def _preempt(self, sequence, **options):
        sequence.num_pending = 0
        super()._preempt(sequence, **options)


class ForgetsPagesOfCancelled(Scheduler):
    def cancel(self, id, finish_reason="cancelled"):
        if id in self._alive:
            self._alive[id].pages = []
        return super().cancel(id, finish_reason)


class ReleasesTwiceWhenCancelled(Scheduler):
    def cancel(self, id, finish_reason="cancelled"):
        pages = self._alive[id].pages if id in self._alive else []
        was_alive = super().cancel(id, finish_reason)
        self._rows.pool.release(pages)
        return was_alive


class RecordsCancelled(Scheduler):
    def record(self, plan, tokens):
        for chunk in plan.chunks:
            if chunk.is_last and chunk.sequence.finish_reason == "cancelled":
                chunk.sequence.extend(tokens[chunk.sequence.id])
        return super().record(plan, tokens)


class PlansBeyondTheLength(Scheduler):
    def add(self, sequence):
        super().add(sequence)
        sequence.max_len += 1

    def record(self, plan, tokens):
        changed = super().record(plan, tokens)
        for sequence in changed:
            if sequence.finish_reason is None and len(sequence.tokens) == sequence.max_len - 1:
                self.cancel(sequence.id, "length")
        return changed


class ReleasesBeforeTheLastStep(Scheduler):
    def plan(self, drafts):
        plan = super().plan(drafts)
        for sequence in self._rows:
            if sequence.is_complete:
                self._rows.release(sequence)
        return plan


class PreemptsTheOldest(Scheduler):
    def _grow(self):
        for sequence in self._rows:
            while sequence.slot is not None and not self._rows.grow(sequence):
                self._preempt(min(self._rows, key=Sequence.rank))


class AdmitsTheNewestFirst(Scheduler):
    def _admit(self, step, num_preempted):
        self._waiting.reverse()
        super()._admit(step, num_preempted)
        self._waiting.sort(key=Sequence.rank)


class IgnoresThePriority(Scheduler):
    def add(self, sequence):
        super().add(sequence)
        self._waiting.sort(key=lambda each: each.arrival)


class IgnoresTheBudget(Scheduler):
    def _admit(self, step, num_preempted):
        step.num_left += 1
        super()._admit(step, num_preempted)


class LosesStepsOfDecodes(Scheduler):
    def _admit(self, step, num_preempted):
        decoding = [sequence for sequence in step.counts if sequence.is_decoding]
        if len(decoding) > 2:
            step.drop(decoding[-1])
        super()._admit(step, num_preempted)


class WaitsForAllOfABurst(Scheduler):
    def _num_prompt_tokens(self):
        self._num_waited = 0
        return super()._num_prompt_tokens()


class WaitsWithoutPrompts(Scheduler):
    def _decode(self, drafts, step):
        if step.num_left == self.limits.step_tokens or step.prompts_only:
            super()._decode(drafts, step)


class PublishesPagesOfDrafts(Scheduler):
    def plan(self, drafts):
        plan = super().plan(drafts)
        for chunk in plan.chunks if plan else ():
            sequence = chunk.sequence
            if chunk.num_drafts and sequence.pages:
                known, sequence.num_computed = sequence.tokens, chunk.start + chunk.count
                sequence.tokens = [*known, *chunk.ids[1:]]
                self._rows.publish(sequence)
                sequence.tokens, sequence.num_computed = known, chunk.start + 1
        return plan


class CountsRejectedDraftsAsComputed(Scheduler):
    def record(self, plan, tokens):
        changed = super().record(plan, tokens)
        for chunk in plan.chunks:
            if chunk.num_drafts and chunk.sequence.slot is not None and chunk.sequence.num_computed:
                chunk.sequence.num_computed = chunk.start + chunk.count
        return changed


class PlansWhileDraftsAreVerified(Scheduler):
    def plan(self, drafts):
        for sequence in self._rows:
            sequence.is_verified = False
        return super().plan(drafts)


class DraftsBeyondTheLength(Scheduler):
    def _verify(self, sequence, drafts, step):
        sequence.max_len += 1
        super()._verify(sequence, drafts, step)
        sequence.max_len -= 1


class DraftsWithoutPages(Rows):
    def grow(self, sequence, num_drafts=0):
        return super().grow(sequence)


class KeepsPagesOfRejectedDrafts(Rows):
    def shrink(self, sequence):
        pass


class ReleasesPagesOfTheNextToken(Rows):
    def shrink(self, sequence):
        self.pool.release(sequence.pages[-1:])
        del sequence.pages[-1:]


class DraftsAfterUnknownTokens(Scheduler):
    def _verify(self, sequence, drafts, step):
        num_pending, sequence.num_pending = sequence.num_pending, 0
        super()._verify(sequence, drafts, step)
        sequence.num_pending = num_pending


class KeepsTokensAfterTheEnd(Scheduler):
    def record(self, plan, tokens):
        changed = super().record(plan, tokens)
        for sequence, count in changed.items():
            sequence.tokens += tokens[sequence.id][count:]
        return changed


FAULTS = [
    each
    for each in vars().copy().values()
    if isinstance(each, type) and issubclass(each, PagePool | Rows | Scheduler) and each.__module__ == __name__
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_checks_catch(fault):
    kind = {PagePool: "pool", Rows: "rows", Scheduler: "scheduler"}[fault.__base__]
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(150):
            Simulation(random_scenario(random.Random(seed), **{kind: fault}), max_steps=1000).run()


@pytest.mark.parametrize("seed", range(3))
def test_the_same_scenarios_pass_without_a_fault(seed):
    Simulation(random_scenario(random.Random(seed))).run()
