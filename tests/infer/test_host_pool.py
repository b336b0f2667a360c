"""Decoding state that leaves the device and comes back, against a device that completes steps only when told."""

import collections
import random

import pytest
from hypothesis import given, settings, strategies as st

from axcore.infer.scheduling.host_pool import HostLimits, HostPool
from axcore.infer.scheduling.limits import SchedulerLimits
from axcore.infer.scheduling.pages import PageUsage
from axcore.infer.scheduling.rows import Rows
from axcore.infer.scheduling.scheduler import Scheduler

from .fake_device import Arrival, Scenario, Simulation, exported
from .scenarios import random_host, random_scenario, request


def scenario_of(rng, **changes):
    return random_host(rng, random_scenario(rng, **changes))


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_every_sequence_gets_the_tokens_of_the_model(rng):
    Simulation(scenario_of(rng)).run()


def test_many_scenarios_that_offload_restore_import_and_export():
    total = collections.Counter()
    for seed in range(100):
        simulation = Simulation(scenario_of(random.Random(seed))).run()
        host = simulation.scheduler.host
        total["offloaded"] += host.num_offloaded
        total["recomputed"] += simulation.scheduler.num_preempted - host.num_offloaded
        total["restored"] += simulation.num_restored
        for id, arrival in enumerate(simulation.scenario.arrivals):
            total["imported"] += arrival.is_imported
            if arrival.is_exported and simulation.sequences[id].finish_reason != "cancelled":
                found = simulation.device.exported[id]
                weights = range(simulation.num_flushed + 1)
                assert found in [exported(arrival.request, each) for each in weights]
                total["exported"] += 1
    assert min(total.values()) > 40 and len(total) == 5, total


LONG = SchedulerLimits(2, 40, 40)


def test_a_preempted_sequence_comes_back_without_being_computed_again():
    requests = [request([at] * 9, 16, ignore_eos=True) for at in (1, 2)]
    for num_pages, expected in ((8, 1), (0, 0)):
        host = HostLimits(num_pages, offloads_preempted=True)
        arrivals = tuple(Arrival(0, each) for each in requests)
        # Without prefixes: the pages of the preempted one would otherwise stay cached on the device for a while.
        scenario = Scenario(LONG, arrivals, num_pages=8, host=host, shares_prefixes=False)
        simulation = Simulation(scenario)
        simulation.device.has_slots = False
        simulation.run()
        computed = sum(row.count for rows in simulation.trace for row in rows)
        assert simulation.scheduler.num_preempted >= 1
        assert simulation.scheduler.host.num_offloaded == expected * simulation.scheduler.num_preempted
        assert (computed == 2 * (9 + 15)) == bool(expected)


def test_an_evicted_prefix_comes_back():
    prompt, other = request([1] * 17, 1), request([2] * 30, 1)
    arrivals = (Arrival(0, prompt), Arrival(5, other), Arrival(10, request([1] * 17, 4)))
    for num_pages, cached in ((0, 0), (2, 8), (20, 16)):
        scenario = Scenario(LONG, arrivals, num_pages=9, host=HostLimits(num_pages))
        simulation = Simulation(scenario).run()
        # Without room on the host, what is left of the prefix on the device counts.
        assert simulation.sequences[2].num_cached >= cached
        assert simulation.num_restored == (num_pages > 0)


def test_pages_of_the_host_are_counted():
    scenario = Scenario(
        LONG, (Arrival(0, request([1] * 17, 1)), Arrival(5, request([2] * 30, 1))), 9, host=HostLimits(6)
    )
    simulation = Simulation(scenario).run()
    assert simulation.scheduler.host.pages.usage == PageUsage(live=0, cached=3, free=3)


def test_an_exported_sequence_that_is_cancelled_is_not_read():
    arrivals = (Arrival(0, request([1] * 30, 1), cancel_at=1, is_exported=True),)
    simulation = Simulation(Scenario(SchedulerLimits(1, 40, 8), arrivals, num_pages=9)).run()
    assert not simulation.device.exported


# Faults that the checks of the simulation must catch.


class OffloadsAfterTheRelease(HostPool):
    """The copies run after the step instead of before it."""

    def take(self):
        late, self.late = getattr(self, "late", ()), super().take()
        return late


class RestoresBeforeItOffloads(HostPool):
    def take(self):
        return tuple(sorted(super().take(), key=lambda each: each.kind != "restore"))


class LosesPagesOfTheHost(HostPool):
    def drop(self, sequence):
        sequence.saved = None


class ReplacesPagesBeforeTheyAreRestored(HostPool):
    def restore(self, sequence, num_cached, prefix):
        found = super().restore(sequence, num_cached, prefix)
        for key in list(self.pages._published if self.pages else ()):
            page = self.pages._published[key]
            if page in prefix and not self._pool.match([key]):
                self._evicted(sequence.pages[0], key + b"other")
        return found

    def retained(self, pages):
        return super().retained([])


class CountsTooManyTokens(HostPool):
    def restore(self, sequence, num_cached, prefix):
        return super().restore(sequence, num_cached, prefix) + bool(prefix)


class ForgetsTheSlot(HostPool):
    def offload(self, sequence):
        is_offloaded = super().offload(sequence)
        self._transfers = [each for each in self._transfers if each.slot is None]
        return is_offloaded


class KeepsPrefixesOfOldWeights(Scheduler):
    def flush(self):
        epoch, keys = self._rows.pool.epoch, dict(self.host.pages._published) if self.host.pages else {}
        super().flush()
        self._rows.pool.epoch = epoch
        if self.host.pages:
            for key, page in keys.items():
                self.host.pages._published[key], self.host.pages._keys[page] = page, key


class KeepsSavedStateOfOldWeights(Scheduler):
    def flush(self):
        saved = [(each, each.saved, each.num_computed) for each in self._waiting if each.saved]
        super().flush()
        for sequence, state, num_computed in saved:
            if state.handover is not None:
                sequence.saved, sequence.num_computed = state, num_computed


class LeavesSavedStateOfCancelled(Scheduler):
    def cancel(self, id, finish_reason="cancelled"):
        if id in self._alive and self._alive[id].saved is not None and self._alive[id].saved.handover is None:
            self._alive[id].saved = None
        return super().cancel(id, finish_reason)


class SkipsPagesOfTheHost(Rows):
    def lookup(self, sequence):
        found = super().lookup(sequence)
        return found._replace(host_pages=found.host_pages[1:])


FAULTS = [
    each
    for each in vars().copy().values()
    if isinstance(each, type) and issubclass(each, HostPool | Rows | Scheduler) and each.__module__ == __name__
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_checks_catch(fault):
    kind = {HostPool: "host_pool", Rows: "rows", Scheduler: "scheduler"}[fault.__base__]
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(200):
            Simulation(scenario_of(random.Random(seed), **{kind: fault}), max_steps=1000).run()
