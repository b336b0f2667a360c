"""Whatever keeps decoding state, and whatever runs beside a request: an engine gives the tokens and log-probabilities
of full recomputation, at the boundaries of pages, windows and chunks, and one token before and after them."""

import gc
import random
import threading

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from axcore.infer import Request, SamplingOptions
from axcore.testing.models import VOCAB_SIZE

from . import equality
from .equality import CACHES, MAX_LEN, MODELS, PAGE, PAGES, STEP, WINDOW

EXACT = 1e-5
"""Largest error of a log-probability in float32. Both sides are within 3e-6 of float64, about as far as rounding the
parameters moves it. This holds while attention logits are below about 10, as in all models here, since the rounding
error of an attention weight grows with them: with logits of 225, it is up to 5e-4."""
EDGES = sorted({at + off for at in (1, PAGE, WINDOW, 2 * PAGE, STEP, STEP + PAGE) for off in (-1, 0, 1)} - {0})
PREFIX = np.random.default_rng(0).integers(0, VOCAB_SIZE, MAX_LEN).tolist()
"""The tokens with which the prompts begin that share a prefix."""
IN_CI = {("mixture, windows", "paged"), ("Mamba-2", "paged"), ("cross-layer KV, LoRA", "paged")}


@st.composite
def asked(draw):
    """A request, and after how many of its tokens it is cancelled; None: never."""
    length = draw(st.sampled_from(EDGES))
    shared = draw(st.sampled_from((0, length // 2, length - 1)))
    own = np.random.default_rng(draw(st.integers(0, 3))).integers(0, VOCAB_SIZE, length - shared).tolist()
    options = SamplingOptions(
        temperature=draw(st.sampled_from((0.0, 0.8))),
        seed=draw(st.integers(0, 3)),
        max_tokens=min(draw(st.sampled_from((1, 2, PAGE, 2 * PAGE + 1))), MAX_LEN - length),
        logprobs=0,
        prompt_logprobs=draw(st.sampled_from((False, False, False, True))),
    )
    request = Request((*PREFIX[:shared], *own), options, priority=draw(st.sampled_from((0, 0, 1))))
    return request, draw(st.sampled_from((None, None, None, 0, 1)))


def long_requests(count):
    """Requests that start together and do not fit into the pages together when they grow."""
    own = np.random.default_rng(4).integers(0, VOCAB_SIZE, (count, 2 * PAGE + 1)).tolist()
    options = SamplingOptions(temperature=0.0, max_tokens=2 * PAGE + 1, logprobs=0)
    return [(Request(tuple(ids), options), None) for ids in own]


def finished(engine, request, cancel_after, streams):
    """Starts a request. Returns its stream unless it is to be cancelled, which happens after some tokens."""
    stream = engine.stream(request)
    streams.append(stream)
    if cancel_after is None:
        return stream
    for _, _ in zip(range(cancel_after), stream, strict=False):
        pass
    stream.cancel()
    return None


def check(recomputed, request, piece):
    """Compares a whole sample with the recomputed row."""
    ids, num_prompt = [*request.ids, *piece.ids], len(request.ids)
    assert len(piece.ids) == request.options.max_tokens
    expected = recomputed(ids)
    at = np.arange(num_prompt - 1, len(ids) - 1)
    if request.options.temperature == 0:  # a token whose logit is equal up to rounding may be chosen instead
        assert (expected[at].max(axis=-1) - expected[at, piece.ids] <= EXACT).all()
    found = [each.logprob for each in (piece.prompt_logprobs or ()) + piece.logprobs]
    first = 0 if request.options.prompt_logprobs else num_prompt - 1
    wanted = expected[range(first, len(ids) - 1), ids[first + 1 :]]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pytest.param(name, cache, marks=pytest.mark.long if (name, cache) in IN_CI else pytest.mark.slow)
        for name in MODELS
        for cache in CACHES
    ],
)
def test_an_engine_equals_full_recomputation(name, cache):
    with equality.engine(name, cache) as engine:
        recomputed = equality.recomputed(name)

        @settings(max_examples=12, database=None)
        @example(long_requests(4))
        @given(st.lists(asked(), min_size=1, max_size=6))
        def compare(batch):
            streams = []
            started = [(request, finished(engine, request, stop, streams)) for request, stop in batch]
            for request, stream in started:
                if stream is not None:
                    check(recomputed, request, stream.result())

        compare()
        if cache == "paged":
            assert engine.stats.preempted > 0
            assert engine.stats.cached_tokens > 0


@pytest.mark.parametrize(
    "count", [pytest.param(600, marks=pytest.mark.long), pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_random_requests_with_cancellations_leak_nothing(count):
    """Pages, threads, arrays of the device and Python objects do not grow."""
    rng = random.Random(0)
    with equality.engine("differential", "paged") as engine:

        def serve(number):
            streams = []
            for _ in range(number):
                length = rng.choice(EDGES)
                ids = PREFIX[: rng.randrange(length)]
                ids += [rng.randrange(VOCAB_SIZE) for _ in range(length - len(ids))]
                options = SamplingOptions(temperature=0.0, max_tokens=rng.randint(1, 8))
                request = Request(tuple(ids), options, priority=rng.choice((0, 0, 1)), salt=rng.choice(("", "a")))
                streams.append(engine.stream(request))
                if rng.random() < 0.3:
                    rng.choice(streams).cancel()
                if len(streams) > 8:
                    streams.pop(rng.randrange(8)).result()
            assert all(each.result().finish_reason in ("length", "cancelled") for each in streams)

        def held():
            while engine.stats.running or engine.stats.waiting:
                pass
            gc.collect()
            arrays = sum(array.nbytes for array in jax.live_arrays())
            return threading.active_count(), arrays, len(gc.get_objects())

        serve(count // 2)
        before = held()
        serve(count // 2)
        after = held()
        assert after[0] == before[0]
        assert after[1] <= before[1] + 4096 and after[2] <= before[2] + 500, (before, after)
        assert engine.stats.pages.live == 0
        assert engine.stats.pages.free + engine.stats.pages.cached == PAGES
        assert engine.stats.preempted > 0
