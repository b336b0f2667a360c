"""Samples whose decoding state leaves the device and comes back get the tokens of those that run alone."""

import queue

import jax
import numpy as np
import pytest

from axcore.config import AxcoreError, ConfigError
from axcore.infer import Engine, Request
from axcore.infer.decoding.decoder import Decoder
from axcore.infer.execution.programs import Programs
from axcore.infer.execution.row_state import StateLayout, host_limits
from axcore.infer.execution.state_programs import PAGES_PER_CALL, StatePrograms
from axcore.parallel import Mesh
from axcore.testing.devices import on_devices

from .offload_models import CASES, GREEDY, MAX_LEN, prompts, requests

IN_CI = ("paged-int8", "ring", "mamba2-paged")


def interrupted(engine, low, high, resume=None):
    """The tokens of the requests `low` and `high`, of which the latter arrive when the first of `low` has run a while.

    Args:
        resume: submits a request of `low`; None: `Engine.submit`.
    """
    found, delivered = {request: queue.Queue() for request in (*low, *high)}, []

    def deliver(piece):
        found[low[0]].put(piece)
        delivered.append(piece)
        if len(delivered) == 3:  # in the thread of the engine, so the others cannot have ended
            for request in high:
                engine.submit(request, found[request].put)

    for request in low:
        (resume or engine.submit)(request, deliver if request is low[0] else found[request].put)
    return [tokens(found[request]) for request in (*low, *high)]


def tokens(pieces):
    ids = []
    while True:
        piece = pieces.get(timeout=120)
        if isinstance(piece, AxcoreError):
            raise piece
        ids += piece.ids
        if piece.finish_reason is not None:
            return tuple(ids)


def alone(engine, asked):
    return [engine.generate([request])[0].ids for request in asked]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in IN_CI else pytest.mark.slow) for name in CASES]
)
def test_offloaded_samples_and_handovers_change_nothing(name):
    """In one engine, so that it compiles once: samples that start here, and samples that another engine started."""
    case = CASES[name]
    model = case.model()
    low = requests((9, 17, 5), priority=1)
    high = requests((18, 7, 21), seed=1)
    with (
        case.engine(model, cache=case.large) as other,
        case.engine(model, preemption="offload", host_cache_bytes=10**6) as engine,
    ):
        expected = alone(other, [*low, *high])
        assert interrupted(engine, low, high) == expected
        first = engine.stats
        assert first.preempted == first.offloaded > 0 and first.bytes_to_host and first.bytes_to_device

        def resume(request, deliver):
            handover = queue.Queue()
            other.export(request, handover.put)
            engine.resume(request, handover.get(timeout=120), deliver)

        again = [Request((*request.ids, 7), request.options, priority=1) for request in low]
        assert interrupted(engine, again, high, resume) == alone(other, [*again, *high])
        last = engine.stats
        assert last.preempted == last.offloaded > first.offloaded
        assert last.running == last.waiting == 0 and (last.pages is None or last.pages.live == 0)
        assert last.host_pages is None or last.host_pages.live == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["contiguous", "paged"])
def test_without_room_on_the_host_samples_are_computed_again(name):
    case = CASES[name]
    model = case.model()
    low, high = requests((9, 17, 5), priority=1), requests((18, 7, 21), seed=1)
    layout = StateLayout(*decoder_and_state(case, model))
    room = layout.page_bytes * 2 if case.is_paged else layout.slot_bytes
    with (
        case.engine(model, cache=case.large) as other,
        case.engine(model, preemption="offload", host_cache_bytes=room) as engine,
        case.engine(model) as recomputing,
    ):
        expected = alone(other, [*low, *high])
        for each in (engine, recomputing):
            assert interrupted(each, low, high) == expected
        assert engine.stats.offloaded < engine.stats.preempted
        assert recomputing.stats.offloaded == 0 < recomputing.stats.preempted


def decoder_and_state(case, model):
    decoder, _, state = Decoder.of(model, cache=case.cache, batch_size=2, max_len=MAX_LEN)
    return decoder, state


@pytest.mark.long
def test_a_prefix_that_was_evicted_comes_back_from_the_host():
    case = CASES["paged"]
    base, *others = prompts((25, 30, 30, 30))
    with case.engine(case.model(), host_cache_bytes=10**6) as engine:
        first = engine.generate([Request((*base, 7), GREEDY)])[0].ids
        engine.generate([Request(other, GREEDY) for other in others])
        before = engine.stats
        assert before.pages.live == 0 and before.host_pages.cached > 5
        again, longer = engine.generate([Request((*base, 7), GREEDY), Request((*base, 8), GREEDY)])
        after = engine.stats
        # 24 tokens of each are in six full pages. One was still on the device, or all were on the host.
        assert after.cached_tokens - before.cached_tokens >= 2 * 24 and after.bytes_to_device > before.bytes_to_device
        assert again.ids == first
    with case.engine(case.model(), cache=case.large) as other:
        assert alone(other, [Request((*base, 7), GREEDY), Request((*base, 8), GREEDY)]) == [first, longer.ids]


@pytest.mark.long
@pytest.mark.parametrize("name", ["contiguous", "paged", "ring-paged"])
def test_nothing_compiles_after_the_warm_up(name):
    case, events = CASES[name], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: events.append(event) if event.endswith("backend_compile_duration") else None
    )
    low, high = requests((9, 17, 5), priority=1), requests((18, 7, 21), seed=1)
    with case.engine(case.model(), preemption="offload", host_cache_bytes=10**6) as engine:
        engine.warm_up()
        compiled = engine.stats.compiled
        assert events
        events.clear()
        interrupted(engine, low, high)
        for request in low:
            handover, pieces = queue.Queue(), queue.Queue()
            engine.export(request, handover.put)
            engine.resume(request, handover.get(timeout=120), pieces.put)
            tokens(pieces)
        assert engine.stats.offloaded and (engine.stats.compiled, events) == (compiled, [])


@pytest.mark.parametrize("name", ["paged-int8", "ring", "mamba2-paged"])
def test_pages_and_slots_that_are_written_are_read_again(name):
    """Every array, in groups of every size and one more. Other pages and slots keep what they have."""
    case = CASES[name]
    model = case.model()
    decoder, params, state = Decoder.of(
        model, cache=case.large, batch_size=3, max_len=MAX_LEN, unstack=name != "paged-int8"
    )
    random = np.random.default_rng(0)
    state["model"] = jax.tree.map(
        lambda x: np.asarray(random.integers(-99, 99, x.shape)).astype(x.dtype), state["model"]
    )
    state = jax.tree.map(jax.numpy.asarray, state)
    before = jax.device_get(state)
    programs = Programs(decoder, params, state, None)
    layout = StateLayout(decoder, state)
    moved = StatePrograms(programs, layout)
    assert layout.slot.keys() | layout.pages.keys() == layout.leaves(before).keys()
    for count in {0, *(size + more for size in PAGES_PER_CALL for more in (0, 1))} if layout.pages else ():
        pages = random.permutation(40)[:count].tolist()
        groups = moved.read_pages(pages)
        read = {path: np.concatenate([np.asarray(b[path])[:n] for n, b in groups]) for path in layout.pages if groups}
        for path, block in read.items():
            axis = layout.page_axes[path]
            np.testing.assert_array_equal(block, np.moveaxis(layout.leaves(before)[path], axis, 0)[pages])
        to = [page + 10 for page in pages]
        moved.write_pages(to, read)
        after = jax.device_get(programs.state)
        for path, block in read.items():
            wanted = np.moveaxis(layout.leaves(before)[path], layout.page_axes[path], 0).copy()
            wanted[to] = block
            np.testing.assert_array_equal(np.moveaxis(layout.leaves(after)[path], layout.page_axes[path], 0), wanted)
        before = after
    moved.write_slot(2, 17, jax.device_get(moved.read_slot(0)))
    after = jax.device_get(programs.state)
    assert after["lengths"].tolist() == [0, 0, 17]
    for path, axis in layout.slot_axes.items():
        wanted = np.moveaxis(layout.leaves(before)[path], axis, 0).copy()
        wanted[2] = wanted[0]
        np.testing.assert_array_equal(np.moveaxis(layout.leaves(after)[path], axis, 0), wanted)


def on_eight_devices_and_one():
    case = CASES["paged"]
    rules = {"batch": "data", "head": "tensor", "kv_head": "tensor", "embed": "data", "vocab": "tensor"}
    layout = Mesh(shape={"data": 4, "tensor": 2}, rules=rules).make()
    low, high = requests((9, 17, 5), priority=1), requests((18, 7, 21), seed=1)
    found = []
    for each in (layout, None):
        cfg = Engine.Config(
            cache=case.cache, max_len=MAX_LEN, max_rows=4, step_tokens=16, preemption="offload", host_cache_bytes=10**6
        )
        with cfg.build(case.model(), layout=each) as engine:
            engine.warm_up(["greedy", "full"])
            compiled = engine.stats.compiled
            found.append(interrupted(engine, low, high))
            assert engine.stats.offloaded > 0 and engine.stats.compiled == compiled
    return found


@pytest.mark.slow
def test_an_engine_on_eight_devices():
    eight, one = on_devices(on_eight_devices_and_one)
    assert eight == one


def test_settings_without_room_or_use_raise():
    model = CASES["contiguous"].model()
    for fields, message in (
        ({"preemption": "offload"}, r"engine.host_cache_bytes=0 has no room .* bytes a row. Set it to at least"),
        ({"preemption": "offload", "host_cache_bytes": 9}, r"engine.host_cache_bytes=9 has no room"),
        ({"host_cache_bytes": 10**6}, r"engine.host_cache_bytes=1000000 has no use"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine.Config(max_len=MAX_LEN, **fields).build(model)
    with pytest.raises(ConfigError, match="preemption"):
        Engine.Config(max_len=MAX_LEN, preemption="swap")


def test_host_memory_is_divided_between_pages_and_slots():
    case = CASES["mamba2-paged"]
    layout = StateLayout(*decoder_and_state(case, case.model()))
    for size, num_slots in ((40 * layout.slot_bytes, 16), (9 * layout.slot_bytes, 4)):
        found = host_limits(layout, size, max_rows=2, offloads_preempted=True)
        assert found.num_slots == num_slots
        assert found.num_pages == (size - num_slots * layout.slot_bytes) // layout.page_bytes
