"""An engine gives the tokens of full recomputation, whatever runs beside a request."""

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import queue
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from flax import nnx

import axcore as ax
from axcore.config import AxcoreError, ConfigError
from axcore.infer import BeamOptions, Engine, Request, SamplingOptions, Stream
from axcore.infer.engine import engine as engine_module
from axcore.infer.execution.runner import Runner
from axcore.infer.sequences import Sequence
from axcore.module import functional
from axcore.parallel import Mesh
from axcore.testing.devices import on_devices
from axcore.testing.models import VOCAB_SIZE, tiny_model
from axcore.train.data import ByteTokenizer
from axcore_paged_kv.cache import PagedCache

MAX_LEN = 48
GREEDY = SamplingOptions(temperature=0.0, max_tokens=9)
CACHES = {"contiguous": {}, "paged": {"cache": PagedCache.Config(page_size=4, num_pages=24)}}


@pytest.fixture(scope="module", params=CACHES)
def engine(request, model):
    cfg = Engine.Config(max_len=MAX_LEN, max_rows=3, step_tokens=20, **CACHES[request.param])
    with cfg.build(model, eos_ids=(5,)) as engine:
        yield engine


@pytest.fixture(scope="module")
def recomputed(model):
    """Greedy tokens by recomputing the whole row for each token."""
    fn, params, state = functional(model)
    logits = jax.jit(lambda row, at: fn(params, state, row[None])[0][0][0, at])

    def sample(ids, options):
        row, tokens = np.zeros(MAX_LEN, np.int32), list(ids)
        for _ in range(options.max_tokens):
            row[: len(tokens)] = tokens
            tokens.append(int(np.argmax(logits(row, len(tokens) - 1))))
            if tokens[-1] == 5 and not options.ignore_eos:
                break
        return tuple(tokens[len(ids) :])

    return sample


def prompts(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [tuple(random.integers(6, VOCAB_SIZE, length).tolist()) for length in lengths]


@pytest.mark.parametrize(
    "lengths",
    [
        (1, 2, 3, 4, 5),
        pytest.param((3, 4, 8, 9, 19, 20, 21, 38), marks=pytest.mark.long),
        pytest.param((38, 1, 38, 1, 38), marks=pytest.mark.long),
    ],
)
def test_mixed_rows_get_the_tokens_of_full_recomputation(engine, recomputed, lengths):
    asked = [Request(ids, GREEDY) for ids in prompts(lengths)]
    for request, found in zip(asked, engine.generate(asked), strict=True):
        expected = recomputed(request.ids, GREEDY)
        assert found.ids == expected
        assert found.finish_reason == ("stop" if expected[-1] == 5 else "length")


@pytest.mark.long
def test_cached_prefixes_change_nothing(engine, recomputed):
    (base,) = prompts((17,), seed=1)
    asked, before = [Request((*base, end), GREEDY) for end in (6, 7, 6)], engine.stats.cached_tokens
    found = [engine.generate([request])[0] for request in asked]
    assert [each.ids for each in found] == [recomputed(request.ids, GREEDY) for request in asked]
    assert sum(each.num_cached for each in found) == engine.stats.cached_tokens - before
    assert [each.num_cached for each in found] == ([0, 0, 0] if engine.stats.pages is None else [0, 16, 16])


@pytest.mark.long
def test_requests_that_arrive_and_leave_meanwhile_change_nothing(engine, recomputed):
    first, *others = prompts((6, 11, 2, 30, 7, 5), seed=2)
    stream = engine.stream(Request(first, GREEDY))
    tokens = list(next(stream).ids)
    cancelled = [engine.stream(Request(ids, GREEDY)) for ids in others]
    next(cancelled[0])
    for each in cancelled:
        each.cancel()
    tokens += [id for piece in stream for id in piece.ids]
    assert tuple(tokens) == recomputed(first, GREEDY)
    assert all(each.result().finish_reason in ("cancelled", "length", "stop") for each in cancelled)
    assert engine.stats.running == engine.stats.waiting == 0


@pytest.mark.long
def test_a_seed_gives_the_same_sample_beside_other_requests(engine):
    ids, *others = prompts((7, 3, 12, 25), seed=3)
    options = SamplingOptions(seed=11, top_k=8, top_p=0.9, repetition_penalty=1.2, max_tokens=12, ignore_eos=True)
    alone = engine.generate([Request(ids, options)])[0]
    beside = engine.generate(
        [Request(each, SamplingOptions(max_tokens=20)) for each in others] + [Request(ids, options)]
    )
    assert beside[-1].ids == alone.ids
    assert engine.stream(Request(ids, options), sample=1).result().ids != alone.ids


@pytest.mark.long
def test_penalties_count_the_tokens_of_the_row(engine):
    (ids,) = prompts((5,), seed=4)
    options = SamplingOptions(temperature=0.0, presence_penalty=1e4, max_tokens=12, ignore_eos=True)
    tokens = engine.generate([Request(ids, options)])[0].ids
    assert len(set(tokens)) == len(tokens)


@pytest.mark.long
def test_log_probabilities_are_those_of_the_logits(engine, model):
    (ids,) = prompts((5,), seed=5)
    options = SamplingOptions(temperature=0.0, max_tokens=3, logprobs=4, ignore_eos=True)
    found = engine.generate([Request(ids, options)])[0]
    fn, params, state = functional(model)
    logits = np.asarray(fn(params, state, np.array([ids + found.ids]))[0][0])[0].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for at, (token, each) in enumerate(zip(found.ids, found.logprobs, strict=True), len(ids) - 1):
        assert each.id == token and each.rank == 0 and len(each.top) == 4
        np.testing.assert_allclose(each.logprob, expected[at, token], atol=1e-5)
        np.testing.assert_allclose([value for _, value in each.top], np.sort(expected[at])[::-1][:4], atol=1e-5)


@pytest.mark.long
def test_min_tokens_excludes_end_and_stop_tokens(engine, recomputed):
    (ids,) = prompts((9,), seed=6)
    first = recomputed(ids, GREEDY)[0]
    options = SamplingOptions(temperature=0.0, max_tokens=6, stop_token_ids=(first,), min_tokens=3)
    tokens = engine.generate([Request(ids, options)])[0].ids
    assert first not in tokens[:3] and 5 not in tokens[:3]
    assert engine.generate([Request(ids, SamplingOptions(temperature=0.0, stop_token_ids=(first,)))])[0].ids == (first,)


def test_asyncio_consumers_get_the_same_pieces(engine, recomputed):
    asked = [Request(ids, GREEDY) for ids in prompts((4, 13), seed=7)]

    async def whole(request):
        return tuple([id async for piece in engine.astream(request) for id in piece.ids])

    async def both():
        return await asyncio.gather(*map(whole, asked))

    assert asyncio.run(both()) == [recomputed(request.ids, GREEDY) for request in asked]


def test_requests_that_cannot_run_raise(engine):
    with pytest.raises(ConfigError, match=r"request.ids: a prompt of 48 tokens leaves no room .* 48 tokens"):
        engine.generate([Request((6,) * 48)])
    with pytest.raises(ConfigError, match=rf"request.ids: token id {VOCAB_SIZE} is not below {VOCAB_SIZE}"):
        engine.generate([Request((VOCAB_SIZE,))])
    with pytest.raises(ConfigError, match=r"request.adapter='lora': the engine has no adapters. Use None, or set"):
        engine.generate([Request((6,), adapter="lora")])
    with pytest.raises(ConfigError, match=r"adapter 'lora': the engine has no room for adapters. Set engine.adapters"):
        engine.load_adapter("lora", "runs/lora")
    with pytest.raises(ConfigError, match=r"sampling.stop=\('a',\) requires a tokenizer"):
        engine.generate([Request((6,), SamplingOptions(stop=("a",)))])


@pytest.mark.long
def test_logits_that_are_not_finite_end_only_their_sample(model, recomputed):
    """A token whose embedding is NaN leaves nothing in the caches that would change later requests."""
    (ids,) = prompts((7,), seed=9)
    wanted = recomputed(ids, GREEDY)
    for cache in CACHES.values():
        spoiled = nnx.clone(model)
        embedding = spoiled.embedding.weight
        embedding[...] = embedding[...].at[9].set(np.nan)
        assert 9 not in ids + wanted
        with Engine.Config(max_len=MAX_LEN, max_rows=1, step_tokens=20, **cache).build(spoiled, eos_ids=(5,)) as engine:
            with pytest.raises(AxcoreError, match="no token can be sampled: the logits are not finite"):
                engine.generate([Request((9,) * 30, GREEDY)])
            assert engine.generate([Request(ids, GREEDY)])[0].ids == wanted


@pytest.mark.long
@pytest.mark.parametrize("is_committed", [False, True], ids=["new", "loaded"])
@pytest.mark.parametrize("cache", CACHES)
def test_nothing_compiles_after_the_warm_up(model, cache, is_committed):
    if is_committed:  # to a device, as weights from a folder are
        fn, params, state = ax.functional(model)
        model = fn.bind(jax.device_put(params, jax.devices()[0]), state)
    cfg = Engine.Config(max_len=32, max_rows=2, step_tokens=16, **CACHES[cache])
    assert compiled_late(cfg, model, None)[1:] == (0, 0)


def compiled_late(cfg, model, layout):
    """The output of some requests, and the programs that were traced and compiled after the warm-up."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.append(name) if name.endswith("backend_compile_duration") else None
    )
    with cfg.build(model, layout=layout) as engine:
        engine.warm_up(prompt_logprobs=True)
        compiled = engine.stats.compiled
        assert events
        events.clear()
        options = [
            GREEDY,
            SamplingOptions(max_tokens=8, seed=0),
            SamplingOptions(max_tokens=8, seed=0, top_p=0.5, frequency_penalty=0.1, logprobs=3, prompt_logprobs=True),
        ]
        asked = [Request(ids, options[at % 3]) for at, ids in enumerate(prompts((1, 5, 9, 16, 17, 20)))]
        found = [piece.ids for piece in engine.generate(asked)]
        return found, engine.stats.compiled - compiled, len(events)


def on_eight_devices_and_one():
    model = tiny_model().build(rngs=ax.Rngs(0))
    rules = {"batch": "data", "head": "tensor", "kv_head": "tensor", "embed": "data", "vocab": "tensor"}
    layout = Mesh(shape={"data": 4, "tensor": 2}, rules=rules).make()
    cfg = Engine.Config(max_len=32, max_rows=4, step_tokens=16)
    return compiled_late(cfg, model, layout), compiled_late(cfg, model, None)


@pytest.mark.long
def test_an_engine_on_eight_devices():
    eight, one = on_devices(on_eight_devices_and_one)
    assert eight == one and one[1:] == (0, 0)


@pytest.fixture
def short_lived(model):
    """An engine that a test may close or break."""
    with Engine.Config(max_len=32, max_rows=2, step_tokens=16).build(model) as engine:
        yield engine


def test_a_failing_step_ends_every_sample_with_the_cause(short_lived, monkeypatch):
    streams = [short_lived.stream(Request(ids, SamplingOptions())) for ids in prompts((3, 4, 5))]
    next(streams[0])
    monkeypatch.setattr(Runner, "read", lambda *_: 1 / 0)
    for stream in streams:
        with pytest.raises(AxcoreError, match="the engine failed: ZeroDivisionError"):
            stream.result()
    with pytest.raises(AxcoreError, match="the engine is closed"):
        short_lived.stream(Request((6,)))
    with pytest.raises(AxcoreError, match="the engine is closed"):
        short_lived.warm_up()


def num_live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_close_ends_samples_and_frees_the_caches(model):
    before, threads = num_live_bytes(), set(threading.enumerate())
    engine = Engine.Config(max_len=1024, max_rows=2, step_tokens=16).build(model)
    assert num_live_bytes() > before + 100_000  # while it is idle: a step that starts deletes its donated arrays
    stream = engine.stream(Request((6, 7), SamplingOptions(ignore_eos=True)))
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(AxcoreError, match="the engine was closed"):
        stream.result()
    assert not {each for each in threading.enumerate() if each.name == "axcore-engine"} - threads
    assert num_live_bytes() < before + 10_000


def test_close_ends_a_warm_up_after_the_programs_that_compile(short_lived, monkeypatch):
    closing = threading.Thread(target=short_lived.close)

    def compile(*_, **__):
        with contextlib.suppress(RuntimeError):  # another program has started it
            closing.start()
        while not short_lived.is_closed:
            time.sleep(0.001)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    with pytest.raises(AxcoreError, match="the engine was closed"):
        short_lived.warm_up()
    closing.join()


def test_a_callback_that_raises_ends_only_its_sample(short_lived, recomputed, caplog):
    (ids,) = prompts((4,), seed=10)
    other = short_lived.stream(Request(ids, GREEDY))
    called = []

    def deliver(piece):
        called.append(piece)
        raise KeyError("lost")

    short_lived.submit(Request((6, 7)), deliver)
    assert other.result().ids == short_lived.generate([Request(ids, GREEDY)])[0].ids
    assert len(called) == 1 and "KeyError: 'lost'" in caplog.text
    assert short_lived.stats.running == short_lived.stats.waiting == 0


def test_a_callback_may_submit_and_close_but_not_wait(short_lived):
    found = queue.Queue()

    def last(piece):
        found.put(piece)
        short_lived.close()

    def first(piece):
        with pytest.raises(AxcoreError, match="cannot wait for the engine"):
            short_lived.warm_up()
        short_lived.submit(Request((6,), GREEDY), last)

    short_lived.submit(Request((6, 7), SamplingOptions(max_tokens=1)), first)
    assert len(found.get(timeout=60).ids) == 1
    assert isinstance(found.get(timeout=60), AxcoreError)


def test_a_request_that_is_submitted_while_the_engine_closes_is_refused(model):
    reached, closed = threading.Event(), threading.Event()

    class SlowTokenizer:
        def decode(self, ids):
            reached.set()
            closed.wait(60)
            return b""

    engine = Engine.Config(max_len=32, max_rows=2, step_tokens=16).build(model, SlowTokenizer())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        submitted = pool.submit(engine.submit, Request((6,)), print)
        assert reached.wait(60)
        engine.close()
        closed.set()
        with pytest.raises(AxcoreError, match="the engine is closed"):
            submitted.result(60)


def test_a_stream_that_is_deleted_cancels_its_sample(short_lived):
    finishes = queue.Queue()
    endless = Request((6, 7), SamplingOptions(ignore_eos=True))

    def submit(deliver):
        return short_lived.submit(endless, lambda piece: (deliver(piece), finishes.put(piece.finish_reason)))

    stream = Stream(submit)
    del stream
    while (finish := finishes.get(timeout=60)) is None:
        pass
    assert finish == "cancelled"


ENDLESS = """
import axcore as ax
from axcore.infer import Engine, Request, SamplingOptions
from axcore.testing.models import tiny_model

model = ax.pipe(tiny_model(), ax.use("rope")).build(rngs=ax.Rngs(0))
engine = Engine.Config(max_len=100_000, max_rows=2, step_tokens=16).build(model)
stream = engine.stream(Request((6, 7), SamplingOptions(ignore_eos=True)))
next(stream)
"""


@pytest.mark.long
def test_an_interpreter_that_ends_closes_its_engines():
    ended = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_prefix_caching_requires_pages(model):
    with pytest.raises(
        ConfigError, match=r"engine\.prefix_caching=True requires pages .*layers\.0\.attention\.cache has"
    ):
        Engine.Config(max_len=32, prefix_caching=True).build(model)


@pytest.mark.long
def test_texts_are_scored_as_their_tokens():
    tokenizer = ByteTokenizer.Config().build()
    text_model = tiny_model().set(vocab_size=tokenizer.vocab_size).build(rngs=ax.Rngs(0))
    with Engine.Config(max_len=32, max_rows=2).build(text_model, tokenizer) as engine:
        ids = engine.request("def é").ids
        (text, exact) = engine.score(["def é", ids])
    assert [each.id for each in text] == list(ids[1:])
    np.testing.assert_allclose([each.logprob for each in text], [each.logprob for each in exact], atol=1e-5)


@pytest.mark.parametrize("given", ["def ", (1, 2)])
def test_a_prompt_without_a_request_raises(engine, given):
    with pytest.raises(ConfigError, match=r"is not a Request\. Use engine\.request\(text"):
        engine.generate([given])


def test_one_request_or_prompt_instead_of_a_list_raises(engine):
    with pytest.raises(ConfigError, match=r"takes a list of requests.*engine\.generate\(\[request\]\)"):
        engine.generate(Request((1, 2)))
    for method in (engine.score, engine.embed, lambda prompts: engine.beam_search(prompts, BeamOptions(max_tokens=2))):
        for prompt in ("def ", [1, 2], np.arange(3)):
            with pytest.raises(ConfigError, match=r"expected a list of prompts.*Write it as \[prompt\]"):
                method(prompt)


def test_a_text_requires_a_tokenizer(engine):
    with pytest.raises(ConfigError, match=r"engine\.request requires a tokenizer"):
        engine.score(["def "])


@pytest.mark.long
def test_scores_are_the_log_probabilities_of_the_model(engine, model):
    """Prompts that take one step, several steps, and share cached pages with earlier ones."""
    rows = [*prompts((2, 9, 21, 45), seed=8), *prompts((45,), seed=8)]
    fn, params, state = functional(model)
    for ids, found in zip(rows, engine.score(rows), strict=True):
        logits = np.asarray(fn(params, state, np.array([ids]))[0][0])[0].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert [each.id for each in found] == list(ids[1:])
        np.testing.assert_allclose([each.logprob for each in found], expected[range(len(ids) - 1), ids[1:]], atol=1e-5)


@pytest.mark.parametrize("name", CACHES)
def test_a_step_is_read_before_the_next_is_planned_only_if_a_sequence_needs_its_last_token(
    model, recomputed, monkeypatch, name
):
    class Waiting(Sequence):
        needs_last_token = property(lambda self: self.request.salt == "waits", lambda self, _: None)

    events, start, read = [], Runner.start, Runner.read

    def record(kind, plan):
        if any(isinstance(chunk.sequence, Waiting) for chunk in plan.chunks):  # engines of other tests may still run
            events.append((kind, plan))

    def started(runner, plan, *args):
        record("start", plan)
        return start(runner, plan, *args)

    def collected(runner, flight):
        record("collect", flight.plan)
        return read(runner, flight)

    monkeypatch.setattr(engine_module, "Sequence", Waiting)
    monkeypatch.setattr(Runner, "start", started)
    monkeypatch.setattr(Runner, "read", collected)
    cfg = Engine.Config(max_len=MAX_LEN, max_rows=3, step_tokens=20, **CACHES[name])
    for salt in ("waits", "runs ahead"):
        events.clear()
        asked = [Request(ids, GREEDY, salt=salt) for ids in prompts((30, 4))] + [Request((6, 7), GREEDY)]
        with cfg.build(model, eos_ids=(5,)) as engine:
            found = [piece.ids for piece in engine.generate(asked)]
        assert found == [recomputed(request.ids, GREEDY) for request in asked]
        waiting = [[chunk for chunk in plan.chunks if chunk.sequence.needs_last_token] for _, plan in events]
        assert any(waiting) == (salt == "waits")
        assert all(chunk.ids for chunks in waiting for chunk in chunks)
        in_flight = [kind for kind, _ in events]
        assert ("start", "start") in itertools.pairwise(in_flight)
        for (kind, plan), (after, _) in itertools.pairwise(events):
            if kind == "start" and any(chunk.is_last for chunk in plan.chunks if chunk.sequence.needs_last_token):
                assert after == "collect"


def test_samples_of_a_request_share_its_prompt(engine):
    (ids,) = prompts((17,), seed=8)
    asked = [Request(ids, SamplingOptions(seed=3, max_tokens=5, ignore_eos=True)), Request(ids[:5], GREEDY)]
    cached = engine.stats.cached_tokens
    found = engine.generate(asked, n=3)
    assert [piece.ids for piece in found[:3]] == [engine.stream(asked[0], sample=at).result().ids for at in range(3)]
    assert len({piece.ids for piece in found[:3]}) == 3
    assert [piece.ids for piece in found[3:]] == 3 * [engine.generate(asked[1:])[0].ids]
    assert engine.stats.pages is None or engine.stats.cached_tokens >= cached + 2 * 16
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="n must be an int of at least 1"):
            engine.generate(asked, n=wrong)


@pytest.mark.parametrize("cache", CACHES)
def test_caches_that_do_not_fit_in_memory_are_named(model, cache):
    cfg = Engine.Config(max_len=32, max_rows=10**12, **CACHES[cache])
    if cache == "paged":
        cfg = cfg.set(max_rows=1, cache=cfg.cache.set(num_pages=10**13))
    with pytest.raises(AxcoreError, match=r"memory for the KV caches .*iB. Reduce max_rows .*num_pages .*EXHAUSTED"):
        cfg.build(model)
