"""Schedules against their formulas in float64, and the number of steps that fits a time budget."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.train import WarmupCosine, WarmupStableDecay
from axcore.train.run import budget
from axcore.train.run.budget import Budget
from axcore.train.step.program import UNKNOWN_STEPS


@functools.cache
def compiled(schedule):
    return jax.jit(jax.vmap(schedule, (0, None)))


def rates(schedule, total, steps=None):
    """The rate of each step. Steps are evaluated in groups of equal size, so that a schedule compiles once."""
    steps = np.arange(total) if steps is None else np.asarray(steps)
    padded = np.resize(steps, -(-len(steps) // 500) * 500)
    groups = [compiled(schedule)(group.astype(np.int32), jnp.int32(total)) for group in padded.reshape(-1, 500)]
    return np.concatenate([*groups, np.zeros(0, np.float32)])[: len(steps)]


@pytest.mark.parametrize("warmup", [0, 1, 10, 250])
@pytest.mark.parametrize("total", [1, 7, 100, 1000])
def test_warmup_cosine_follows_its_formula(total, warmup):
    found = rates(WarmupCosine(peak=3e-3, warmup_steps=warmup, final=0.2), total)
    for step in range(total):
        expected = 1.0
        if step >= warmup and total > warmup:
            through = min(1.0, (step - max(warmup, 1)) / max(total - max(warmup, 1), 1))
            expected = 0.2 + 0.8 * (1 + math.cos(math.pi * max(through, 0.0))) / 2
        expected = min(expected, (step + 1) / max(warmup, 1))
        assert found[step] == pytest.approx(3e-3 * expected, rel=2e-5), step


@pytest.mark.parametrize("total", [1, 7, 100, 1000])
@pytest.mark.parametrize(("warmup", "decay"), [(0, 0.3), (10, 0.3), (1, 1.0), (10, 0.0), (250, 0.5)])
def test_warmup_stable_decay_follows_its_formula(total, warmup, decay):
    found = rates(WarmupStableDecay(peak=2e-3, warmup_steps=warmup, decay=decay), total)
    for step in range(total):
        left = (total - step) / (decay * total) if decay * total >= 1 else 1.0
        expected = min(1.0, (step + 1) / max(warmup, 1), left)
        assert found[step] == pytest.approx(2e-3 * expected, rel=2e-5), step


@pytest.mark.parametrize("schedule", [WarmupCosine(warmup_steps=10), WarmupStableDecay(warmup_steps=10)])
def test_rates_are_float32_positive_and_do_not_rise_after_warmup(schedule):
    found = rates(schedule, 500)
    assert found.dtype == np.float32
    assert (found > 0).all() and (found <= np.float32(schedule.peak)).all()
    assert (np.diff(found[:10]) > 0).all() and (np.diff(found[10:]) <= 1e-10).all()


def test_warmup_stable_decay_reaches_zero_after_the_last_step():
    found = rates(WarmupStableDecay(peak=1.0, warmup_steps=1, decay=0.5), 100, [99, 100, 101])
    assert found.tolist() == pytest.approx([0.02, 0.0, 0.0])


@pytest.mark.parametrize("schedule", [WarmupCosine(warmup_steps=10), WarmupStableDecay(warmup_steps=10)])
def test_with_unknown_length_the_rate_stays_at_the_peak(schedule):
    found = rates(schedule, UNKNOWN_STEPS, [0, 4, 9, 10, 1000, 100_000])
    assert found.tolist() == pytest.approx([schedule.peak * x for x in (0.1, 0.5, 1, 1, 1, 1)], rel=1e-5)


@pytest.mark.parametrize("total", [50, 1000, 20_000])
def test_rates_in_the_settled_share_do_not_depend_on_the_length(total):
    for schedule in (WarmupStableDecay(warmup_steps=10, decay=0.4), WarmupCosine(warmup_steps=10)):
        until = int(schedule.settled() * total)
        steps = np.arange(until)
        assert np.array_equal(rates(schedule, total, steps), rates(schedule, UNKNOWN_STEPS, steps))


class Clock:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(budget, "time", clock)
    return clock


WSD = WarmupStableDecay(decay=0.25)


def drive(clock, decider, seconds_per_step, start=0, stop_after=3600.0):
    """Steps until the number of steps is decided: (steps done, total), or None if that never happens."""
    step, end = start, clock.now + stop_after
    while clock.now < end:
        step += 1
        clock.now += seconds_per_step(step) if callable(seconds_per_step) else seconds_per_step
        total = decider.decide(step)
        if total is not None:
            return step, total
    return None


@pytest.mark.parametrize("seconds_per_step", [0.0005, 0.002, 0.1, 2.0, 20.0])
def test_steps_of_any_duration_fill_the_time_budget(clock, tmp_path, seconds_per_step):
    decider = Budget(4.0, WSD, tmp_path, began=clock.now)
    decided = drive(clock, decider, seconds_per_step, stop_after=300)
    assert decided is not None, "the run would never end"
    step, total = decided
    assert step * seconds_per_step == pytest.approx(0.75 * 240, abs=5 + 2 * seconds_per_step)
    assert total * seconds_per_step == pytest.approx(240, abs=2 * seconds_per_step + 0.01)


def test_the_total_is_decided_when_the_schedule_needs_it(clock, tmp_path):
    (tmp_path / "cosine").mkdir()
    cosine = drive(clock, Budget(4.0, WarmupCosine(), tmp_path / "cosine", began=clock.now), 0.1)
    steady = drive(clock, Budget(4.0, WSD, tmp_path, began=clock.now), 0.1)
    assert cosine[0] * 0.1 == pytest.approx(budget.MEASURED_SECONDS, abs=0.3)
    assert steady[0] * 0.1 == pytest.approx(180, abs=0.3)


def test_time_before_the_first_step_counts(clock, tmp_path):
    decider = Budget(4.0, WSD, tmp_path, began=clock.now - 100.0)  # compiling, or an earlier attempt
    step, total = drive(clock, decider, 0.1)
    assert step * 0.1 == pytest.approx(80, abs=0.3)
    assert total * 0.1 == pytest.approx(140, abs=0.3)


def test_the_pace_is_that_of_the_latest_steps(clock, tmp_path):
    decider = Budget(60.0, WSD, tmp_path, began=clock.now)
    step, total = drive(clock, decider, lambda step: 10.0 if step <= 20 else 0.5)
    spent = 200 + (step - 20) * 0.5
    assert spent == pytest.approx(2700, abs=1)
    assert (total - step) * 0.5 == pytest.approx(3600 - spent, abs=2)


def test_a_spent_budget_ends_after_one_more_step(clock, tmp_path):
    decider = Budget(1.0, WSD, tmp_path, began=clock.now - 1000.0)
    step, total = drive(clock, decider, 0.1)
    assert total == step + 1


def test_a_decision_is_made_once_and_kept_on_disk(clock, tmp_path):
    decider = Budget(4.0, WSD, tmp_path, began=clock.now)
    assert decider.expected is None
    step, total = drive(clock, decider, 0.1)
    assert json.loads((tmp_path / "plan.json").read_text()) == {"total_steps": total, "decided_at": step}
    assert decider.expected == total
    clock.now += 50.0
    assert all(decider.decide(later) is None for later in range(step + 1, total))


def test_another_attempt_repeats_the_decision_at_another_pace(clock, tmp_path):
    step, total = drive(clock, Budget(4.0, WSD, tmp_path, began=clock.now), 0.1)
    clock.now += 10_000.0
    again = Budget(4.0, WSD, tmp_path, began=clock.now)
    assert again.expected == total
    assert drive(clock, again, 3.0, start=step - 40) == (step, total)


def test_an_estimate_is_available_before_the_decision(clock, tmp_path):
    decider = Budget(4.0, WSD, tmp_path, began=clock.now)
    for step in range(1, 101):
        clock.now += 0.1
        assert decider.decide(step) is None
    assert decider.expected == pytest.approx(2400, abs=3)
    assert not (tmp_path / "plan.json").exists()
