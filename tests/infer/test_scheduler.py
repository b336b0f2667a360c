"""The scheduler against a device that completes steps only when told, whatever arrives, ends or is cancelled when."""

import collections
import dataclasses
import random

import pytest
from hypothesis import given, settings, strategies as st

from axcore.config import ConfigError
from axcore.infer.scheduling.host_pool import HostLimits
from axcore.infer.scheduling.limits import SchedulerLimits
from axcore.infer.scheduling.pages import PagePool
from axcore.infer.scheduling.prefix_states import PrefixStates
from axcore.infer.scheduling.scheduler import Scheduler
from axcore.infer.sequences import Sequence

from .fake_device import END, Arrival, Scenario, Simulation
from .scenarios import random_host, random_request, random_scenario, request


def started(limits, requests, num_pages=None, page_size=4, **changes):
    """A simulation in which all requests have just arrived."""
    arrivals = tuple(Arrival(0, each) for each in requests)
    return Simulation(Scenario(limits, arrivals, num_pages, page_size, **changes))


def dispatched(simulation, at=-1):
    """The number of tokens of each sequence in a step."""
    return {row.id: row.count for row in simulation.trace[at]}


@given(st.randoms(use_true_random=False))
def test_every_sequence_gets_the_tokens_of_the_model(rng):
    Simulation(random_scenario(rng)).run()


def test_many_scenarios_that_preempt_share_and_cancel():
    total = collections.Counter()
    for seed in range(80):
        simulation = Simulation(random_scenario(random.Random(seed))).run()
        sequences = simulation.sequences.values()
        total["preempted"] += simulation.scheduler.num_preempted
        total["shared"] += sum((sequence.num_cached or 0) > 0 for sequence in sequences)
        total.update(sequence.finish_reason for sequence in sequences)
    assert min(total.values()) > 40 and total.keys() == {"preempted", "shared", "stop", "length", "cancelled"}, total


def test_rows_whose_keys_change_are_computed_again():
    """Rows that pass a length, with and without drafts, are computed again while others go on; also those that pass it
    while their state is in host memory, or with the first token after a prompt that another device has computed."""
    num_again = 0
    for seed in range(120):
        rng = random.Random(seed)
        scenario = random_scenario(rng)
        if seed % 2:
            scenario = random_host(rng, scenario)
        size = scenario.limits.max_len
        passed = tuple(sorted(rng.sample(range(1, size), min(2, size - 1))))
        step_tokens = passed[-1] + 1 + rng.randint(0, 9)
        limits = SchedulerLimits(rng.randint(1, 4), size, step_tokens, recompute_above=passed)
        simulation = Simulation(dataclasses.replace(scenario, limits=limits, shares_prefixes=False)).run()
        rows = [row for step in simulation.trace for row in step]
        num_again += sum(row.start == 0 and row.count > len(row.request.ids) for row in rows)
        assert all(row.count >= limits.first_chunk(len(row.request.ids)) for row in rows if row.start == 0)
    assert num_again > 200


def test_a_row_is_computed_again_in_its_slot():
    """The step before it is known first, and another row decodes meanwhile."""
    limits = SchedulerLimits(2, 40, 8, recompute_above=(6,))
    simulation = started(limits, [request(4, 9, ignore_eos=True), request(3, 4, ignore_eos=True)]).run()
    steps = [{row.id: (row.slot, row.start, row.count) for row in step} for step in simulation.trace]
    assert [step.get(0) for step in steps[:6]] == [(0, 0, 4), (0, 4, 1), (0, 5, 1), None, (0, 0, 7), (0, 7, 1)]
    assert simulation.scheduler.num_preempted == 0


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_two_runs_have_equal_plans(rng):
    scenario = random_scenario(rng)
    assert Simulation(scenario).run().trace == Simulation(scenario).run().trace


def test_a_step_has_decodes_first_and_then_chunks_of_several_prompts():
    simulation = started(SchedulerLimits(4, 100, 12), [request(1, 9, ignore_eos=True), request(10, 9), request(9, 9)])
    for _ in range(3):
        simulation.step()
    assert [dispatched(simulation, at) for at in range(3)] == [
        {0: 1, 1: 10, 2: 1},
        {0: 1, 1: 1, 2: 8},
        {0: 1, 1: 1, 2: 1},
    ]
    assert [row.id for row in simulation.trace[1]] == [0, 1, 2]


def test_a_burst_has_larger_steps_until_the_rest_fits_into_one():
    """It begins above two of its steps of 20 tokens, and only prompts that have a slot count."""
    limits = SchedulerLimits(4, 100, 8, 20)
    for lengths, steps in (
        ([10] * 4, [8] * 5),
        ([12, 10, 10, 10], [20, 20, 2]),
        ([30, 17], [20, 20, 7]),
        ([10] * 4 + [50], [8] * 5 + [20, 20, 10]),
    ):
        simulation = started(limits, [request(length, 30, ignore_eos=True) for length in lengths]).run()
        prompts = [sum(row.count for row in rows if row.start < lengths[row.id]) for rows in simulation.trace]
        assert [count for count in prompts if count] == steps, lengths


def test_sequences_that_decode_wait_for_a_burst_but_not_for_long():
    """The first sequence decodes when four prompts of 60 tokens arrive, of which a step of a burst computes 20. After
    four steps, one of the usual size follows."""
    limits = SchedulerLimits(5, 100, 8, 20)
    later = [Arrival(2, request(60, 1, salt=str(number))) for number in range(4)]
    scenario = Scenario(limits, (Arrival(0, request(5, 30, ignore_eos=True)), *later))
    simulation = Simulation(scenario).run()
    steps = [(sum(row.count for row in rows if row.id), any(row.id == 0 for row in rows)) for rows in simulation.trace]
    waits = [(20, False)] * 4
    assert steps[2:15] == [*waits, (8, True), *waits, (8, True), *waits][:13], steps[2:15]


@pytest.mark.parametrize("is_ahead", [True, False])
def test_the_last_token_is_known_ahead_and_wastes_no_row(is_ahead):
    simulation = started(
        SchedulerLimits(2, 100, 50), [request(5, 7, ignore_eos=True)], num_pages=9, is_ahead=is_ahead
    ).run()
    assert sum(len(rows) for rows in simulation.trace) == 7  # one for the prompt, six for the output but the last token


def test_slot_and_pages_are_reused_in_the_step_after_the_last():
    simulation = started(SchedulerLimits(1, 8, 8), [request(4, 2), request(4, 2, salt="other")], num_pages=2).run()
    assert [[row.id for row in rows] for rows in simulation.trace] == [[0], [0], [1], [1]]


def test_end_tokens_stop_a_sequence_after_min_tokens():
    limits = SchedulerLimits(2, 200, 50)
    plain, ignoring, stopping = (
        next(iter(started(limits, [each]).run().sequences.values()))
        for each in (request(3), request(3, ignore_eos=True), request(3, min_tokens=40))
    )
    assert (plain.finish_reason, plain.output[-1]) == ("stop", END) and len(plain.output) < 40
    assert (
        ignoring.finish_reason == "length"
        and len(ignoring.tokens) == 200
        and ignoring.output[: len(plain.output)] == plain.output
    )
    assert stopping.finish_reason == "stop" and len(stopping.output) > 40 and END not in stopping.output[:40]


def test_stop_ids_end_a_sequence():
    free = next(iter(started(SchedulerLimits(1, 60, 9), [request(3, ignore_eos=True)]).run().sequences.values()))
    token = free.output[4]
    sequence = Sequence(0, request(3, ignore_eos=True, stop_token_ids=(token,)))
    sequence.max_len = 60
    for each in free.output[:4]:
        assert sequence.extend([each]) == 1 and sequence.finish_reason is None
    assert sequence.extend([token, 1, 2]) == 1 and sequence.finish_reason == "stop"
    assert sequence.output == free.output[:5]


def test_sequences_of_one_request_share_the_pages_of_its_prompt():
    simulation = started(SchedulerLimits(8, 100, 64), [request(41, 8, ignore_eos=True)] * 5, num_pages=40)
    simulation.step()
    assert dispatched(simulation) == {0: 41}  # the others wait for its pages
    simulation.step()
    assert dispatched(simulation) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    assert simulation.pool.usage.live == 10 + 5
    simulation.run()
    assert [sequence.num_cached for sequence in simulation.sequences.values()] == [0, 40, 40, 40, 40]


def test_a_prompt_that_is_computed_again_was_not_cached():
    waiting = request(15, 1, priority=1)
    arrivals = Arrival(0, waiting), Arrival(2, request(4, 8, priority=0, ignore_eos=True))
    simulation = Simulation(Scenario(SchedulerLimits(1, 40, 4), arrivals, num_pages=20)).run()
    assert simulation.scheduler.num_preempted == 1  # it had published two pages, and finds them again
    assert [row.start for rows in simulation.trace for row in rows if row.id == 0] == [0, 4, 8, 12]
    assert simulation.sequences[0].num_cached == 0


def test_prefixes_are_shared_up_to_the_page_before_the_last_token():
    for length, cached in ((8, 4), (9, 8), (10, 8)):
        pair = [Arrival(0, request(length, 3)), Arrival(9, request(length, 3))]
        simulation = Simulation(Scenario(SchedulerLimits(1, 40, 40), tuple(pair), num_pages=20)).run()
        assert simulation.sequences[1].num_cached == cached


def test_outputs_are_shared_as_prefixes_of_the_next_turn():
    first = next(iter(started(SchedulerLimits(1, 60, 40), [request(6, 11, ignore_eos=True)]).run().sequences.values()))
    turn = request([*first.tokens, 5, 6], 3)
    scenario = Scenario(SchedulerLimits(1, 60, 40), (Arrival(0, first.request), Arrival(30, turn)), num_pages=20)
    assert Simulation(scenario).run().sequences[1].num_cached == 16


@pytest.mark.parametrize(
    ("changes", "version", "flush_at", "cached"),
    [
        ({}, 1, set(), 12),
        ({"salt": "b"}, 1, set(), 0),
        ({"adapter": "b"}, 1, set(), 0),
        ({"adapter": None}, 1, set(), 0),
        ({}, 2, set(), 0),
        ({}, 1, {20}, 0),
    ],
)
def test_other_salts_adapters_and_weights_share_nothing(changes, version, flush_at, cached):
    first, second = (request(13, 3, **{"salt": "a", "adapter": "a"} | each) for each in ({}, changes))
    arrivals = (Arrival(0, first), Arrival(30, second, adapter_version=version))
    scenario = Scenario(SchedulerLimits(1, 40, 40), arrivals, num_pages=20, flush_at=frozenset(flush_at))
    assert Simulation(scenario).run().sequences[1].num_cached == cached


def test_the_newest_of_the_lowest_priority_is_preempted_and_nobody_admitted():
    requests = [
        request([at] * 4, 12, priority=priority, ignore_eos=True) for at, priority in ((1, 0), (2, 1), (3, 1), (4, 0))
    ]
    simulation = started(SchedulerLimits(5, 16, 40), requests, num_pages=4)
    simulation.arrivals.append((4, Arrival(1, request([5], 2, priority=-1))))
    running = []
    for _ in range(3):
        simulation.step()
        running.append((simulation.scheduler.num_preempted, set(dispatched(simulation))))
    # In the second step, each needs a second page, and the request that arrives has the highest priority.
    assert running == [(0, {0, 1, 2, 3}), (2, {0, 3}), (3, {0, 4})]
    simulation.run()


def test_a_sequence_alone_may_use_the_whole_pool():
    simulation = started(
        SchedulerLimits(2, 100, 60, watermark=0.5), [request(4, 36, ignore_eos=True)] * 2, num_pages=10
    ).run()
    assert max(len(rows[0].pages) for rows in simulation.trace) == 10


@pytest.mark.parametrize("num_pages", [None, 10])
def test_a_higher_priority_takes_the_place_of_a_lower_one(num_pages):
    low, high = request([1] * 30, 9, priority=1, ignore_eos=True), request([2] * 20, 2, priority=0)
    arrivals = (Arrival(0, low), Arrival(3, high), Arrival(3, high))
    simulation = Simulation(Scenario(SchedulerLimits(1, 40, 40), arrivals, num_pages))
    for _ in range(4):
        simulation.step()
    assert dispatched(simulation) == {1: 20} and simulation.scheduler.num_preempted == 1
    simulation.run()


def test_an_equal_priority_waits():
    arrivals = (Arrival(0, request(30, 9, ignore_eos=True)), Arrival(1, request([2], 2)))
    simulation = Simulation(Scenario(SchedulerLimits(1, 40, 40), arrivals, num_pages=10)).run()
    assert simulation.scheduler.num_preempted == 0 and len(simulation.trace) == 9 + 2


@pytest.mark.parametrize("state", ["waiting", "partly computed", "in flight", "sampled", "last in flight", "preempted"])
def test_cancelling_in_every_state_returns_the_pages(state):
    lengths = {"waiting": (30, 9), "partly computed": (30, 9), "last in flight": (4, 1)}.get(state, (4, 30))
    simulation = started(
        SchedulerLimits(1 if state == "waiting" else 4, 48, 16), [request(8, 39, ignore_eos=True)] * 2, num_pages=12
    )
    simulation.arrivals.append((2, Arrival(1, request([3] * lengths[0], lengths[1], ignore_eos=True))))
    simulation.step()
    simulation.step()
    sequence = simulation.sequences[2]
    if state == "sampled":
        simulation.step()
    while state == "preempted" and (sequence.slot is not None or sequence.num_pending):
        simulation.step()
    is_waiting = sequence.slot is None and simulation.scheduler.num_waiting > 0
    assert is_waiting == (state in ("waiting", "preempted"))
    assert sequence.is_complete == (state == "last in flight")
    assert state != "partly computed" or 0 < sequence.num_computed < 30
    simulation.cancel(2)
    simulation.run()
    assert sequence.finish_reason == "cancelled"


def test_a_stop_string_ends_a_sequence_with_its_own_reason():
    simulation = started(SchedulerLimits(1, 40, 40), [request(4, 30, ignore_eos=True)], num_pages=10)
    for _ in range(4):
        simulation.step()
    assert simulation.scheduler.cancel(0, "stop")
    assert simulation.scheduler.is_idle
    while simulation.in_flight:
        simulation.record()
    assert simulation.sequences[0].finish_reason == "stop" and len(simulation.sequences[0].output) == 3


@pytest.mark.parametrize(
    ("num_pages", "given_request", "message"),
    [
        (None, request(32), r"request.ids: a prompt of 32 tokens .* within 32 tokens \(max_len\). .* at most 31"),
        (
            5,
            request(20),
            r"request.ids: a prompt of 20 tokens .* within 20 tokens \(the size of the page pool\). .* 19",
        ),
        (None, request(30, 3), r"sampling.max_tokens=3 and a prompt of 30 tokens exceed 32 .* Use at most 2"),
        (5, request(18, 3), r"sampling.max_tokens=3 .* exceed 20 tokens \(the size of the page pool\). Use at most 2"),
        (None, request(30, min_tokens=3), r"sampling.min_tokens=3 and a prompt of 30 tokens exceed 32 .* at most 2"),
    ],
)
def test_requests_that_never_fit_are_refused_and_others_unharmed(num_pages, given_request, message):
    simulation = started(SchedulerLimits(2, 32, 16), [request(6, 4)], num_pages)
    simulation.step()
    with pytest.raises(ConfigError, match=message):
        simulation.scheduler.add(Sequence(7, given_request))
    simulation.run()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 8, 8), "engine.max_rows must be at least 1, not 0"),
        ((2, 1, 8), "engine.max_len must be at least 2, not 1"),
        ((8, 8, 0), "engine.step_tokens must be at least 1, not 0"),
        ((2, 8, 8, 8), "engine.burst_tokens=8 must exceed engine.step_tokens=8"),
        ((2, 8, 8, None, 1.0), "limits.watermark must be at least 0 and below 1, not 1.0"),
        ((2, 8, 8, None, float("nan")), "limits.watermark must be .* not nan"),
    ],
)
def test_impossible_limits_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerLimits(*values)


@pytest.mark.parametrize("page_size", [16, 32])
def test_nearly_all_of_the_pool_holds_tokens_before_a_request_waits(page_size):
    rng, num_pages = random.Random(0), 2**17 // page_size
    scheduler = Scheduler(SchedulerLimits(1024, 4096, 2**18), PagePool(num_pages, page_size))
    sequences = [
        Sequence(id, request([1 + id % 20, *range(20)] * rng.randint(4, 80), 64, salt=str(id))) for id in range(400)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.plan()
    assert scheduler.num_waiting > 0
    num_tokens = sum(sequence.num_computed for sequence in sequences)
    assert num_tokens >= 0.96 * num_pages * page_size, num_tokens / (num_pages * page_size)


def test_nearly_all_of_the_pool_holds_tokens_before_a_sequence_is_preempted():
    rng, page_size, num_pages = random.Random(0), 16, 1024
    requests = [request([1 + id % 20] * rng.randint(16, 1500), 400, ignore_eos=True, salt=str(id)) for id in range(30)]
    simulation = started(SchedulerLimits(64, 4096, 2**16), requests, num_pages, page_size)
    while not simulation.scheduler.num_preempted:
        used = sum(sequence.num_computed for sequence in simulation.running())
        simulation.step()
    assert used >= 0.96 * num_pages * page_size, used / (num_pages * page_size)


@pytest.mark.parametrize("num_pages", [None, 12])
def test_newcomers_do_not_starve_older_requests(num_pages):
    rng = random.Random(0)
    arrivals = [Arrival(at, request([rng.randrange(20) for _ in range(rng.randint(1, 20))], 8)) for at in range(300)]
    arrivals[50] = Arrival(50, request([3] * 39, 9, ignore_eos=True))  # the whole pool
    simulation = Simulation(Scenario(SchedulerLimits(4, 48, 12), tuple(arrivals), num_pages))
    starts = {}
    while simulation.arrivals or not simulation.scheduler.is_idle:
        simulation.step()
        for sequence in simulation.running():
            starts.setdefault(sequence.id, simulation.tick)
    assert sorted(starts, key=lambda id: (starts[id], id)) == sorted(starts)  # first come, first served
    simulation.run()


@pytest.mark.long
def test_no_page_is_lost_after_ten_thousand_requests():
    rng = random.Random(0)
    shared = [rng.randrange(20) for _ in range(64)]
    arrivals = []
    for at in range(10_000):
        cancel_at = at // 2 + rng.randint(0, 40) if rng.random() < 0.2 else None
        arrivals.append(Arrival(at // 2, random_request(rng, 48, shared), cancel_at))
    scenario = Scenario(SchedulerLimits(24, 48, 96), tuple(arrivals), num_pages=160, flush_at=frozenset([700, 3100]))
    simulation = Simulation(scenario, max_steps=200_000).run()
    usage = simulation.pool.usage
    assert usage.live == 0 and usage.cached + usage.free == 160
    finishes = collections.Counter(sequence.finish_reason for sequence in simulation.sequences.values())
    assert min(finishes.values()) > 500 and len(finishes) == 3
    assert simulation.scheduler.num_preempted > 100


@pytest.mark.long
def test_many_more_scenarios():
    for seed in range(1000, 1600):
        Simulation(random_scenario(random.Random(seed), max_requests=40)).run()


def test_rows_start_from_saved_states():
    """Those of a model with state in slots, whatever is preempted, offloaded, cancelled, evicted and flushed. Some
    requests use no cached prefix."""
    total = collections.Counter()
    for seed in (*range(120), 328):  # in the last, a row that was offloaded finds more of its prompt in pages
        rng = random.Random(seed)
        scenario = random_scenario(rng, drafting=frozenset(), most_drafts=0)
        if scenario.num_pages is None:
            continue
        host = HostLimits()
        if seed % 2 == 0:
            scenario = random_host(rng, scenario)
            host = HostLimits(num_pages=40, num_slots=rng.randint(1, 5), offloads_preempted=True)
        changes = {"num_states": rng.randint(1, 6), "shares_prefixes": True, "host": host}
        changes["arrivals"] = tuple(map(with_prompt_logprobs, scenario.arrivals[:2])) + scenario.arrivals[2:]
        simulation = Simulation(dataclasses.replace(scenario, **changes)).run()
        assert simulation.states.num_saved <= changes["num_states"]
        transfers = collections.Counter(each.kind for plan in simulation.plans for each in plan.transfers)
        total.update({kind: transfers[kind] for kind in ("save", "load", "restore")})
        total["preempted"] += simulation.scheduler.num_preempted
    assert min(total.values()) > 40, total


def with_prompt_logprobs(arrival):
    options = dataclasses.replace(arrival.request.options, prompt_logprobs=True)
    return dataclasses.replace(arrival, request=dataclasses.replace(arrival.request, options=options))


def test_a_state_is_saved_where_prefixes_divide():
    """The first prompt saves its state at its last full page, the second where it leaves the first, and the third,
    which leaves it there, too, starts from that state."""
    steps = [(row.id, row.start, row.count) for step in divided_prompts(max_rows=1) for row in step]
    assert steps == [(0, 0, 16), (0, 16, 3), (1, 0, 8), (1, 8, 8), (1, 16, 3), (2, 8, 8), (2, 16, 3)]


def test_a_row_waits_for_a_state_that_another_will_save():
    """The third prompt waits for the second, as the second does for the first."""
    steps = [[(row.id, row.start, row.count) for row in step] for step in divided_prompts(max_rows=3)]
    assert steps[:2] == [[(0, 0, 16)], [(0, 16, 3), (1, 0, 8)]]
    assert sorted(steps[2]) == [(1, 8, 8), (2, 8, 8)]


def divided_prompts(max_rows):
    """The steps of three prompts that share 9 tokens, of which two pages are full."""
    asked = [request([*range(1, 10), *[end] * 10], 1) for end in (11, 12, 13)]
    return started(SchedulerLimits(max_rows, 40, 32), asked, num_pages=40, num_states=4).run().trace


def test_the_least_recently_used_state_makes_room():
    states = PrefixStates(2)
    assert [states.save(key) for key in (b"a", b"b", b"a")] == [0, 1, None]
    assert states.save(b"c") == 1
    assert [states.match(keys) for keys in ([b"a"], [b"b"], [b"a", b"b", b"c"], [b"b", b"a", b"b"])] == [1, 0, 3, 2]
    assert states.use(b"a") == 0 and states.save(b"d") == 1
    states.flush()
    assert states.num_saved == states.match([b"a"]) == 0
    assert {states.save(b"a"), states.save(b"b")} == {0, 1}
