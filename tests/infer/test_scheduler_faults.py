"""Wrong schedulers and pools, each with a fault of a real engine, which the checks of the simulation must catch."""

import random

import pytest

from axcore.infer.pages import PagePool
from axcore.infer.scheduler import Scheduler

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


class PublishesBeforeDispatch(Scheduler):
    def _start(self, sequence, cached):
        super()._start(sequence, cached)
        num_full = len(sequence.tokens) // self._pool.page_size
        for at in range(sequence.num_published, min(num_full, len(sequence.keys))):
            self._pool.publish(sequence.pages[at], sequence.keys[at])
            sequence.num_published += 1


class PublishesPagesThatAreNotFull(Scheduler):
    def _publish(self, sequence):
        num_computed = sequence.num_computed
        sequence.num_computed += 1
        super()._publish(sequence)
        sequence.num_computed = num_computed


class SharesThePageOfTheLastToken(Scheduler):
    def _lookup(self, sequence):
        super()._lookup(sequence)
        return self._pool.match(sequence.keys), None


class ResumesWhereItWasPreempted(Scheduler):
    def _preempt(self, sequence):
        num_computed = sequence.num_computed
        super()._preempt(sequence)
        sequence.num_computed = num_computed

    def _start(self, sequence, cached):
        num_computed = sequence.num_computed
        super()._start(sequence, cached)
        sequence.num_computed = max(num_computed, sequence.num_computed)


class DropsTokensInFlight(Scheduler):
    def _preempt(self, sequence):
        sequence.num_pending = 0
        super()._preempt(sequence)


class ForgetsPagesOfCancelled(Scheduler):
    def cancel(self, id, finish="cancelled"):
        if id in self._running:
            self._running[id].pages = []
        return super().cancel(id, finish)


class ReleasesTwiceWhenCancelled(Scheduler):
    def cancel(self, id, finish="cancelled"):
        pages = self._alive[id].pages if id in self._alive else []
        return super().cancel(id, finish) and (self._pool.release(pages) or True)


class RecordsCancelled(Scheduler):
    def record(self, plan, tokens):
        for chunk in plan.chunks:
            if chunk.is_last and chunk.sequence.finish == "cancelled":
                chunk.sequence.append(tokens[chunk.sequence.id])
        return super().record(plan, tokens)


class PlansBeyondTheLength(Scheduler):
    def add(self, sequence):
        super().add(sequence)
        sequence.max_len += 1

    def record(self, plan, tokens):
        changed = super().record(plan, tokens)
        for sequence in changed:
            if sequence.finish is None and len(sequence.tokens) == sequence.max_len - 1:
                self.cancel(sequence.id, "length")
        return changed


class ReleasesBeforeTheLastStep(Scheduler):
    def plan(self):
        plan = super().plan()
        for sequence in list(self._running.values()):
            if sequence.is_complete:
                self._release(sequence)
        return plan


class PreemptsTheOldest(Scheduler):
    def _grow(self):
        for sequence in list(self._running.values()):
            while sequence.slot is not None and self._pool.pages_for(sequence.length) > len(sequence.pages):
                if not self._pool.num_available:
                    self._preempt(next(iter(self._running.values())))
                else:
                    sequence.pages += self._pool.allocate(1)
            if not self._running:
                break


class AdmitsTheNewestFirst(Scheduler):
    def _admit(self, step, num_preempted):
        self._waiting.reverse()
        super()._admit(step, num_preempted)
        self._waiting.sort(key=lambda sequence: sequence.rank)


class IgnoresThePriority(Scheduler):
    def add(self, sequence):
        super().add(sequence)
        self._waiting.sort(key=lambda sequence: sequence.arrival)


class IgnoresTheBudget(Scheduler):
    def _admit(self, step, num_preempted):
        step.num_left += 1
        super()._admit(step, num_preempted)


class KeepsSlots(Scheduler):
    def _release(self, sequence):
        slot = sequence.slot
        super()._release(sequence)
        if len(self._slots) > 1:
            self._slots.remove(slot)


class LosesStepsOfDecodes(Scheduler):
    def _admit(self, step, num_preempted):
        decoding = [sequence for sequence in step.counts if sequence.is_decoding]
        if len(decoding) > 2:
            step.drop(decoding[-1])
        super()._admit(step, num_preempted)


FAULTS = [
    each
    for each in vars().copy().values()
    if isinstance(each, type) and issubclass(each, PagePool | Scheduler) and each.__module__ == __name__
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_checks_catch(fault):
    kind = "pool" if issubclass(fault, PagePool) else "scheduler"
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(150):
            Simulation(random_scenario(random.Random(seed), **{kind: fault}), max_steps=1000).run()


@pytest.mark.parametrize("seed", range(3))
def test_the_same_scenarios_pass_without_a_fault(seed):
    Simulation(random_scenario(random.Random(seed))).run()
