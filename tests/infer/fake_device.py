"""A device that completes steps only when told, and a driver that checks every step of a scheduler against it."""

import collections
import dataclasses
import random
import zlib

from axcore.infer.loaded_adapters import LoadedAdapter
from axcore.infer.requests import Request
from axcore.infer.scheduling.host_pool import HostLimits, HostPool
from axcore.infer.scheduling.limits import SchedulerLimits
from axcore.infer.scheduling.pages import PagePool
from axcore.infer.scheduling.prefix_states import PrefixStates
from axcore.infer.scheduling.rows import Rows
from axcore.infer.scheduling.scheduler import LONGEST_WAIT, Scheduler
from axcore.infer.sequences import SavedState, Sequence

END = 0
VOCAB = 24


def ends(request):
    """The tokens that end a sample."""
    return {*request.options.stop_token_ids, *(() if request.options.ignore_eos else (END,))}


def next_token(request, tokens):
    """The token that the model samples after `tokens`: a function of all of them."""
    token = zlib.crc32(bytes(tokens)) % VOCAB
    is_masked = token in ends(request) and len(tokens) - len(request.ids) < request.options.min_tokens
    return VOCAB if is_masked else token


def expected(sequence):
    """The output and the finish reason of a sequence, if it is not cancelled."""
    request, tokens, finish = sequence.request, list(sequence.request.ids), "length"
    while finish == "length" and len(tokens) < sequence.max_len:
        tokens.append(next_token(request, tokens))
        if tokens[-1] in ends(request):
            finish = "stop"
    return tokens[len(request.ids) :], finish


@dataclasses.dataclass
class Row:
    """A chunk as it was dispatched."""

    request: Request
    adapter: LoadedAdapter | None
    id: int
    slot: int
    pages: tuple[int, ...]
    start: int
    count: int
    is_last: bool
    ids: tuple[int, ...]
    num_drafts: int


class FakeDevice:
    """Runs steps in the order of dispatch. Instead of keys and values, its cache holds all that they depend on.

    What a row reads and writes depends on its page table (or slot), not on the tokens that the scheduler knows, so a
    page that is shared or reused wrongly is noticed. A row reads the cache of the previous step and its own writes, but
    not what other rows write in the same step.

    A slot has recurrent state, too: the number and the hash of the tokens of its row.
    """

    def __init__(self, page_size, has_slots, recompute_above=()):
        self.page_size, self.has_slots = page_size, has_slots  # None: slots only
        self.recompute_above = recompute_above
        self.cache = {}  # (page, offset) -> (token, hash of all tokens so far)
        self.slots = {}  # slot -> (number, hash) of the tokens of the row
        self.host, self.host_slots = {}, {}  # copies of both
        self.states = {}  # saved slots
        self.exported = {}  # by sequence
        self.last = {}  # the token sampled last, by slot
        self.weights = 0
        self.queue = collections.deque()
        self.num_sampled = collections.Counter()

    def dispatch(self, plan):
        rows = [
            Row(
                seq.request,
                seq.adapter,
                seq.id,
                seq.slot,
                tuple(seq.pages),
                chunk.start,
                chunk.count,
                chunk.is_last,
                chunk.ids,
                chunk.num_drafts,
            )
            for chunk in plan.chunks
            for seq in [chunk.sequence]
        ]
        self.queue.append((plan.transfers, rows))
        return rows

    def swap_weights(self):
        self.queue.append(None)

    def complete(self):
        """Runs the oldest step, and returns its tokens: those after accepted drafts, too."""
        while (step := self.queue.popleft()) is None:
            self.weights += 1
        transfers, rows = step
        for each in transfers:
            self.transfer(each)
        tokens, writes, last, slots = {}, {}, {}, {}
        for row in rows:
            ids = row.ids or (self.last[row.slot],)
            assert len(ids) == row.count
            kind = sum(row.start + row.count > limit for limit in self.recompute_above)
            seen, content = [], root(self.weights, row.request, row.adapter, kind)
            for position in range(row.start + row.count):
                cell = self.cell(row, position)
                if position < row.start:
                    token, found = self.cache[cell]
                    content = hash((content, token))
                    assert found == content, "a row reads what was computed for another"
                else:
                    token = ids[position - row.start]
                    content = hash((content, token))
                    assert cell not in writes, "two rows write the same place"
                    writes[cell] = token, content
                seen.append(token)
                if position == row.start - 1 and self.has_slots:
                    assert self.slots[row.slot] == (row.start, content), "a row continues the state of another"
            slots[row.slot] = row.start + row.count, content
            if row.is_last:
                tokens[row.id] = sampled(row, seen)
                last[row.slot] = tokens[row.id][-1]
                self.num_sampled[row.id] += len(tokens[row.id])
        self.cache |= writes
        self.last |= last
        self.slots |= slots
        return tokens

    def transfer(self, each):
        """Runs a transfer, which may read places that were never written, such as the end of the last page."""
        size, cells = self.page_size, range(each.num_tokens)
        if each.kind in ("offload", "restore"):
            assert len(each.pages) == len(each.host_pages)
            for page, host_page in zip(each.pages, each.host_pages, strict=True):
                copy((page,), (host_page,), self.cache, self.host, size, each.kind)
            if each.host_slot is not None:
                copy((each.slot,), (each.host_slot,), self.slots, self.host_slots, None, each.kind)
                if size is None:
                    copy((each.slot,), (each.host_slot,), self.cache, self.host, 1000, each.kind)
            return
        if each.kind == "save":
            self.states[each.state] = self.slots[each.slot]
            return
        if each.kind == "load":
            self.slots[each.slot] = self.states[each.state]
            assert self.slots[each.slot][0] == each.num_tokens, "a state of another number of tokens"
            return
        row = Row(None, None, each.sequence.id, each.slot, each.pages, 0, 0, False, (), 0)
        if each.kind == "export":
            found = [self.cache[self.cell(row, at)] for at in cells]
            self.exported[row.id] = found, self.slots[each.slot]
            return
        content, slot = each.handover
        skipped = each.first_page * (size or 0)
        self.cache |= {self.cell(row, at - skipped): content[at] for at in cells if at >= skipped}
        self.slots[each.slot] = slot

    def cell(self, row, position):
        if self.page_size is None:
            return row.slot, position
        return row.pages[position // self.page_size], position % self.page_size


def root(weights, request, adapter, kind=0):
    """What keys and values depend on besides the tokens.

    Args:
        kind: the number of lengths in `recompute_above` that the row has passed.
    """
    return hash((weights, request.salt, adapter, kind))


def copy(at, host_at, device, host, size, kind):
    """Copies a page, or a slot if `size` is None, between the caches of the device and of the host."""
    source, target, start, end = (device, host, at, host_at) if kind == "offload" else (host, device, host_at, at)
    if size is None:
        target[end[0]] = source[start[0]]
        return
    for offset in range(size):
        target.pop((*end, offset), None)
        if (*start, offset) in source:
            target[*end, offset] = source[*start, offset]


def exported(request, weights, recompute_above=()):
    """The state of a prompt that another device has computed."""
    kind = sum(len(request.ids) > limit for limit in recompute_above)
    content, cells = root(weights, request, None, kind), []
    for token in request.ids:
        content = hash((content, token))
        cells.append((token, content))
    return cells, (len(cells), content)


def sampled(row, seen):
    """The accepted drafts of a row and the token after them."""
    known = len(seen) - row.num_drafts
    for end in range(known, len(seen)):
        if next_token(row.request, seen[:end]) != seen[end]:
            return (*seen[known:end], next_token(row.request, seen[:end]))
    return (*seen[known:], next_token(row.request, seen))


def random_drafts(sequence, seed, most):
    """Drafts that are right up to a random one. The tokens after it are those of the request with it, or random."""
    rng = random.Random(f"{seed}/{sequence.id}/{len(sequence.tokens)}")
    tokens = list(sequence.tokens)
    for _ in range(rng.randint(0, most)):
        token = next_token(sequence.request, tokens)
        tokens.append(token if rng.random() < 0.7 and token < VOCAB else rng.randrange(VOCAB))
    return tuple(tokens[len(sequence.tokens) :])


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request, and when it comes and goes, in steps."""

    at: int
    request: Request
    cancel_at: int | None = None
    adapter_version: int = 1
    is_imported: bool = False  # whether another device has computed the prompt
    is_exported: bool = False


@dataclasses.dataclass(frozen=True)
class Scenario:
    limits: SchedulerLimits
    arrivals: tuple[Arrival, ...]
    num_pages: int | None = None  # None: slots only
    page_size: int = 4
    is_ahead: bool = True  # whether the host plans a step before it records the previous one
    is_late: bool = False  # whether it does so although a sequence waits for its last token
    flush_at: frozenset[int] = frozenset()
    host: HostLimits = HostLimits()
    shares_prefixes: bool = True
    num_states: int = 0  # saved at page boundaries; 0: without slots if prefixes are shared
    most_drafts: int = 0  # of a sequence in a step
    drafting: frozenset[int] = frozenset()  # the sequences with drafts, which wait for their last token
    scheduler: type[Scheduler] = Scheduler
    rows: type[Rows] = Rows
    pool: type[PagePool] = PagePool
    host_pool: type[HostPool] = HostPool


class Simulation:
    """Runs a scenario to its end and checks every step.

    Attributes:
        trace: what was dispatched: for each plan, its rows.
        plans: the plans.
        sequences: every sequence that was added, by id.
    """

    def __init__(self, scenario, max_steps=5000):
        self.scenario = scenario
        pool = None
        if scenario.num_pages is not None:
            pool = scenario.pool(scenario.num_pages, scenario.page_size, shares_prefixes=scenario.shares_prefixes)
        self.pool = pool
        self.states = PrefixStates(scenario.num_states) if scenario.num_states else None
        self.scheduler = scenario.scheduler(scenario.limits, pool, scenario.host, self.states)
        self.scheduler._rows.__class__ = scenario.rows
        self.scheduler.host.__class__ = scenario.host_pool
        # The state of a slot here cannot be rolled back, so it excludes drafts.
        has_slots = (pool is None or not pool.shares_prefixes or self.states is not None) and not scenario.drafting
        page_size = None if pool is None else scenario.page_size
        self.device = FakeDevice(page_size, has_slots, scenario.limits.recompute_above)
        self.num_flushed = self.num_restored = self.num_waited = 0
        self.trace, self.plans, self.sequences, self.in_flight = [], [], {}, collections.deque()
        self.tick, self.max_steps = 0, max_steps
        self.num_tokens_at_cancel = {}
        self.arrivals = collections.deque(sorted(enumerate(scenario.arrivals), key=lambda each: each[1].at))
        self.cancels = collections.defaultdict(list)
        for id, arrival in enumerate(scenario.arrivals):
            if arrival.cancel_at is not None:
                self.cancels[max(arrival.at, arrival.cancel_at)].append(id)

    def run(self):
        while self.arrivals or self.in_flight or not self.scheduler.is_idle:
            assert self.tick < self.max_steps, "no progress"
            self.step()
        for sequence in self.sequences.values():
            self.check_output(sequence)
        self.check_pool()
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        host = self.scheduler.host
        assert host.pages is None or host.pages.usage.live == 0
        assert host.num_free_slots == (host.limits.num_slots or 0)
        if self.pool is not None:
            assert self.pool.usage.live == 0 and self.pool.num_available == self.pool.num_pages
        return self

    def step(self):
        while self.arrivals and self.arrivals[0][1].at <= self.tick:
            self.add(*self.arrivals.popleft())
        if self.tick in self.scenario.flush_at:
            self.scheduler.flush()
            self.device.swap_weights()
            self.num_flushed += 1
            self.check_pool()
        cancels = self.cancels.pop(self.tick, [])
        for id in cancels[::2]:
            self.cancel(id)
        if self.in_flight and self.in_flight[-1].is_read_first and not self.scenario.is_late:
            self.record()
        before, num_preempted = self.running(), self.scheduler.num_preempted
        plan = self.scheduler.plan(self.drafts())
        self.check_order(before, self.scheduler.num_preempted - num_preempted)
        if plan is not None:
            self.check_plan(plan)
            self.plans.append(plan)
            self.trace.append(self.device.dispatch(plan))
        else:
            assert self.in_flight or self.scheduler.is_idle, "nothing runs although sequences wait"
        self.check_pool()
        for id in cancels[1::2]:  # between dispatch and record
            self.cancel(id)
        if plan is not None:
            self.in_flight.append(plan)
        if self.in_flight and (plan is None or len(self.in_flight) > self.scenario.is_ahead):
            self.record()
        self.tick += 1

    def add(self, id, arrival):
        sequence = self.sequences[id] = Sequence(id, arrival.request, eos_ids=[END])
        sequence.is_exported = arrival.is_exported
        sequence.needs_last_token = id in self.scenario.drafting
        if arrival.request.adapter is not None:
            sequence.adapter = LoadedAdapter(arrival.request.adapter, arrival.adapter_version, 0, "")
        if arrival.is_imported:
            sequence.max_len = self.scheduler.max_len_of(arrival.request)
            sequence.num_computed = len(sequence.tokens)
            sequence.extend([next_token(arrival.request, sequence.tokens)])
            sequence.saved = SavedState(
                handover=exported(arrival.request, self.num_flushed, self.scenario.limits.recompute_above)
            )
            self.device.num_sampled[id] += 1
        if sequence.finish_reason is None:
            self.scheduler.add(sequence)

    def drafts(self):
        """Drafts of the sequences that may have some, and of some that may not."""
        scenario = self.scenario
        asked = {*self.scheduler.decoding, *self.running()[:1]}
        found = {each.id: random_drafts(each, scenario.most_drafts, scenario.most_drafts) for each in asked}
        return {id: drafts for id, drafts in found.items() if id in scenario.drafting}

    def record(self):
        plan = self.in_flight.popleft()
        changed = self.scheduler.record(plan, self.device.complete())
        assert all(0 < count <= len(sequence.output) for sequence, count in changed.items())
        self.check_pool()

    def cancel(self, id):
        was_alive = self.sequences[id].finish_reason is None
        assert self.scheduler.cancel(id) == was_alive
        assert not self.scheduler.cancel(id)
        self.num_tokens_at_cancel.setdefault(id, len(self.sequences[id].tokens))
        self.check_pool()

    def check_plan(self, plan):
        limits, chunks = self.scenario.limits, plan.chunks
        assert plan.number == len(self.trace)
        assert plan.chunks or plan.transfers
        multiple = limits.chunk_multiple
        taken = [-(-chunk.count // multiple) * multiple for chunk in plan.prefill]
        assert sum(taken) < (limits.burst_tokens or limits.step_tokens) + multiple
        assert sum(chunk.count for chunk in plan.prefill) <= (limits.burst_tokens or limits.step_tokens)
        assert len(chunks) <= limits.max_rows
        self.num_restored += sum(each.kind == "restore" for each in plan.transfers)
        assert len({chunk.sequence.id for chunk in chunks}) == len(chunks)
        planned = {chunk.sequence.id for chunk in chunks}
        verified = {chunk.sequence.id for each in self.in_flight for chunk in each.chunks if chunk.num_drafts}
        assert not planned & verified, "a sequence is planned although its length is unknown"
        num_left_out = 0
        for sequence in self.running():
            is_decoding = sequence.num_computed + 1 == sequence.length and sequence.id not in verified
            is_current = sequence.num_computed >= limits.first_chunk(sequence.length)  # keys of a row of this length
            assert sequence.id in planned or not sequence.is_complete
            num_left_out += is_decoding and is_current and sequence.id not in planned
        self.num_waited = self.num_waited + 1 if num_left_out else 0
        if num_left_out:
            assert sum(taken) > limits.step_tokens and not plan.decode, "a sequence that decodes lost a step"
            assert self.num_waited <= LONGEST_WAIT, "sequences that decode wait for too long"
        if sum(taken) >= limits.step_tokens + multiple:
            assert not plan.decode, "a step of a burst has sequences that decode"
        for chunk in chunks:
            sequence = chunk.sequence
            if self.pool is not None and sequence.id not in verified:
                num_tokens = max(sequence.length - chunk.is_last, chunk.start + chunk.count)
                assert len(sequence.pages) <= self.pool.pages_for(num_tokens), "a row keeps pages that it does not need"
            assert sequence.finish_reason is None and sequence.slot is not None
            assert chunk.count > 0 and len(chunk.ids) in (0, chunk.count) and (chunk.ids or chunk.count == 1)
            assert chunk.num_drafts < chunk.count and chunk.num_drafts <= self.scenario.most_drafts
            assert not chunk.num_drafts or (sequence.id in self.scenario.drafting and chunk.is_decode)
            longest = sequence.length + chunk.num_drafts
            assert longest <= sequence.max_len, "a step is wasted beyond the maximum length"
            if self.pool is not None:
                self.check_writes(chunk)

    def check_order(self, before, num_preempted):
        """The last in rank are preempted and the first are admitted, except those that wait for a prefix."""
        preempted = [each for each in before if each.slot is None and not each.is_complete]
        kept = [each for each in before if each.slot is not None]
        admitted = [each for each in self.running() if each not in before]
        waiting = [
            each
            for each in self.sequences.values()
            if not each.finish_reason and each.slot is None and not each.is_complete
        ]
        assert len(preempted) == num_preempted, "a sequence is preempted and admitted in one step"
        assert not preempted or kept or admitted, "the only sequence is preempted"
        assert all(left.rank() < right.rank() for left in kept for right in preempted)
        assert all(left.request.priority < right.request.priority for left in admitted for right in preempted)
        prefixes = [self.first_page(each) for each in self.running()]
        passed = [each for each in waiting if self.pool is not None and self.first_page(each) in prefixes]
        assert all(left.rank() < right.rank() for left in admitted for right in waiting if right not in passed)

    def first_page(self, sequence):
        return sequence.request.salt, sequence.tokens[: self.scenario.page_size]

    def check_writes(self, chunk):
        """Pages to be written have one owner and are not offered to others."""
        size, end = self.pool.page_size, chunk.start + chunk.count
        assert end <= len(chunk.sequence.pages) * size
        for page in chunk.sequence.pages[chunk.start // size : (end - 1) // size + 1]:
            assert self.pool._users[page] == 1, "a row writes a page of two rows"
            assert self.pool._keys[page] is None, "a row writes a published page"

    def check_host(self):
        """The host keeps the state of sequences that wait, and of no other."""
        host = self.scheduler.host
        saved = [each.saved for each in self.sequences.values() if each.saved is not None and not each.finish_reason]
        slots = [each.slot for each in saved if each.slot is not None]
        assert len(set(slots)) == len(slots) == (host.limits.num_slots or 0) - host.num_free_slots
        if host.pages is not None:
            users = collections.Counter(page for each in saved for page in each.pages)
            assert host.pages._users == [users[page] for page in range(host.pages.num_pages)], "host pages leak"
        for sequence in self.sequences.values():
            assert sequence.saved is None or (sequence.slot is None and sequence.num_computed)

    def check_pool(self):
        self.check_host()
        slots = [*self.scheduler._rows._slots, *(sequence.slot for sequence in self.running())]
        assert sorted(slots) == list(range(self.scenario.limits.max_rows)), "slots are lost or used twice"
        pool = self.pool
        if pool is None:
            return
        users = collections.Counter(page for sequence in self.running() for page in sequence.pages)
        assert pool._users == [users[page] for page in range(pool.num_pages)], "pages leak"
        usage = pool.usage
        assert sum(usage) == pool.num_pages and usage.live == len(users)
        states = [*users, *pool._unused, *pool._free]
        assert sorted(states) == list(range(pool.num_pages)), "a page is in two states or in none"
        assert all(pool._keys[page] == key for key, page in pool._published.items())
        assert sum(key is not None for key in pool._keys) == len(pool._published)

    def running(self):
        return [sequence for sequence in self.sequences.values() if sequence.slot is not None]

    def check_output(self, sequence):
        output, finish = expected(sequence)
        if sequence.finish_reason == "cancelled":
            assert sequence.output == output[: len(sequence.output)]
            assert len(sequence.tokens) == self.num_tokens_at_cancel[sequence.id], "tokens after the cancellation"
            return
        assert (sequence.output, sequence.finish_reason) == (output, finish)
        num_wasted = self.device.num_sampled[sequence.id] - len(output)
        most_wasted = (finish == "stop") * (self.scenario.is_ahead + self.scenario.most_drafts)
        assert num_wasted <= most_wasted, "rows are wasted"
