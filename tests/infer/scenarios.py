"""Random requests for a scheduler."""

import dataclasses

from axcore.infer.requests import Request, SamplingOptions
from axcore.infer.scheduling.host_pool import HostLimits
from axcore.infer.scheduling.limits import SchedulerLimits

from .fake_device import VOCAB, Arrival, Scenario


def request(ids, max_tokens=None, *, priority=0, salt="", adapter=None, **options):
    """A request for a prompt, given as its tokens or their number."""
    ids = tuple(1 + at % (VOCAB - 1) for at in range(ids)) if isinstance(ids, int) else tuple(ids)
    return Request(ids, SamplingOptions(max_tokens=max_tokens, **options), priority, salt, adapter)


def random_request(rng, max_len, shared):
    """A request that fits into `max_len`. Its prompt starts with some tokens of `shared`."""
    num_prompt = rng.randint(1, max_len - 1)
    num_shared = rng.randint(0, num_prompt)
    vocab = rng.choice([2, VOCAB])  # with two tokens, pages of different prefixes are often equal
    ids = [*shared[:num_shared], *(rng.randrange(vocab) for _ in range(num_prompt - num_shared))]
    max_tokens = rng.choice([None, *[rng.randint(1, max_len - num_prompt)] * 4])
    min_tokens = rng.choice([0, 0, 0, rng.randint(0, max_tokens or max_len - num_prompt)])
    priority, salt = rng.choice([0, 0, 0, 1, 2]), rng.choice(["", "", "", "tenant"])
    return request(ids, max_tokens, priority=priority, salt=salt, min_tokens=min_tokens)


def random_scenario(rng, max_requests=24, **changes):
    """A scenario with a small pool or with slots only, in which some requests are cancelled."""
    page_size = rng.choice([1, 2, 4, 8])
    num_pages = rng.choice([None, *[rng.randint(4, 40)] * 4])
    max_rows = rng.randint(1, 6)
    step_tokens, watermark = rng.randint(1, 40), rng.choice([0, 0.01, 0.2])
    burst_tokens = rng.choice([None, step_tokens + rng.randint(1, 40)])
    limits = SchedulerLimits(max_rows, rng.randint(4, 60), step_tokens, burst_tokens, watermark, rng.choice([1, 1, 4]))
    max_len = limits.max_len if num_pages is None else min(limits.max_len, page_size * num_pages)
    shared = [rng.randrange(VOCAB) for _ in range(max_len)]
    arrivals = []
    for _ in range(rng.randint(1, max_requests)):
        at = rng.randint(0, 40)
        cancel_at = rng.choice([None, None, None, at + rng.randint(0, 30)])
        arrivals.append(Arrival(at, random_request(rng, max_len, shared), cancel_at))
    flush_at = frozenset(rng.randint(0, 60) for _ in range(rng.choice([0, 0, 2])))
    scenario = {
        "limits": limits,
        "arrivals": tuple(arrivals),
        "num_pages": num_pages,
        "page_size": page_size,
        "is_ahead": rng.choice([True, True, False]),
        "flush_at": flush_at,
        "most_drafts": rng.choice([0, 1, 3, 6]),
        "drafting": frozenset(id for id in range(max_requests) if rng.random() < 0.7),
        "is_late": rng.choice([True, False, False]),
    }
    return Scenario(**scenario | changes)


def random_host(rng, scenario):
    """The scenario with host memory. Some of its prompts were computed by another device, or are for another."""
    has_pages = scenario.num_pages is not None
    shares_prefixes = rng.random() < 0.7
    num_slots = None if has_pages and shares_prefixes else rng.randint(0, 5)
    host = HostLimits(rng.randint(0, 40) if has_pages else 0, num_slots, offloads_preempted=rng.random() < 0.8)
    arrivals = list(scenario.arrivals)
    for at, arrival in enumerate(arrivals):
        if rng.random() < 0.2:
            arrivals[at] = dataclasses.replace(arrival, is_imported=True)
        elif rng.random() < 0.2:
            options = dataclasses.replace(arrival.request.options, max_tokens=1, min_tokens=0)
            arrivals[at] = dataclasses.replace(
                arrival, request=dataclasses.replace(arrival.request, options=options), is_exported=True
            )
    return dataclasses.replace(scenario, arrivals=tuple(arrivals), host=host, shares_prefixes=shares_prefixes)
