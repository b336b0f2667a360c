"""Embeddings are the pooled hidden states of the model, however a prompt is computed."""

import queue

import numpy as np
import pytest

import axcore as ax
from axcore.config import ConfigError
from axcore.infer import Engine, Request, SamplingOptions
from axcore.module import Layer, functional, invoke
from axcore.testing.models import VOCAB_SIZE, tiny_model
from axcore.train.data import ByteTokenizer
from axcore_paged_kv.cache import PagedCache

MAX_LEN = 48
CACHES = {"contiguous": {}, "paged": {"cache": PagedCache.Config(page_size=4, num_pages=24)}}
LENGTHS = (1, 2, 16, 17, 19, 20, 21, 40, 41, 47)


@pytest.fixture(scope="module", params=CACHES)
def engine(request, model):
    cfg = Engine.Config(max_len=MAX_LEN, max_rows=3, step_tokens=20, **CACHES[request.param])
    with cfg.build(model, eos_ids=(5,)) as engine:
        engine.warm_up(["greedy"], embeddings=True)
        yield engine


def prompts(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [tuple(random.integers(6, VOCAB_SIZE, length).tolist()) for length in lengths]


def hidden_states(model, ids):
    """float64 [tokens, embed], by one call of the model."""
    _, found = invoke(model, np.array([ids]), capture=["norm"])
    hidden = np.asarray(found.outputs["norm"][0], np.float64)
    logits = model.logits(found.outputs["norm"])  # they are the input of the head
    np.testing.assert_allclose(np.asarray(model(np.array([ids]))), np.asarray(logits), atol=1e-6)
    return hidden


@pytest.mark.long
def test_embeddings_are_the_pooled_hidden_states(engine, model):
    asked = prompts(LENGTHS)
    before = engine.stats.compiled
    last, mean = (engine.embed(asked, pooling=pooling, normalize=False) for pooling in ("last", "mean"))
    unit = engine.embed(asked, pooling="mean")
    assert engine.stats.compiled == before
    for ids, *found in zip(asked, last, mean, unit, strict=True):
        states = hidden_states(model, ids)
        expected = states[-1], states.mean(axis=0), states.mean(axis=0) / np.linalg.norm(states.mean(axis=0))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert engine.stats.running == engine.stats.waiting == 0
    assert engine.stats.tokens == 0


@pytest.mark.long
def test_cached_prefixes_and_samples_beside_them_change_nothing(engine, model):
    (base,) = prompts((23,), seed=1)
    others = [Request(ids, SamplingOptions(max_tokens=12, seed=1, ignore_eos=True)) for ids in prompts((5, 30), seed=2)]
    alone = engine.generate(others)
    cached = engine.stats.cached_tokens
    for pooling in ("last", "mean", "last"):
        asked = [Request((*base, end), SamplingOptions(max_tokens=1), pooling=pooling) for end in (6, 7, 6)]
        found = engine.generate([*others, *asked])
        assert [piece.ids for piece in found[:2]] == [piece.ids for piece in alone]
        for request, piece in zip(asked, found[2:], strict=True):
            states = hidden_states(model, request.ids)
            expected = states[-1] if pooling == "last" else states.mean(axis=0)
            np.testing.assert_allclose(piece.embedding, expected, atol=1e-5)
            assert piece.ids == () and piece.finish_reason == "length"
    assert engine.stats.pages is None or engine.stats.cached_tokens >= cached + 3 * 20


@pytest.mark.long
def test_a_prompt_that_lost_its_pages_has_the_same_mean(model):
    cfg = Engine.Config(cache=PagedCache.Config(page_size=4, num_pages=12), max_len=MAX_LEN, max_rows=3, step_tokens=8)
    embedded, *others = prompts((40, 8, 8), seed=3)
    with cfg.build(model) as engine:
        request = Request(embedded, SamplingOptions(max_tokens=1), priority=1, pooling="mean")
        stream = engine.stream(request)
        urgent = [Request(ids, SamplingOptions(max_tokens=24, ignore_eos=True)) for ids in others]
        engine.generate(urgent)
        assert engine.stats.preempted > 0
        np.testing.assert_allclose(stream.result().embedding, hidden_states(model, embedded).mean(axis=0), atol=1e-5)


def test_prompts_that_do_not_fit_are_refused(engine):
    with pytest.raises(ConfigError, match=r"request.ids=\(\) must have at least one token"):
        engine.embed([(6, 7), ()])
    with pytest.raises(ConfigError, match=r"prompt of 48 tokens leaves no room .* at most 47 tokens"):
        engine.embed([(6,) * 48])
    with pytest.raises(ConfigError, match="is not below"):
        engine.embed([(VOCAB_SIZE,)])
    with pytest.raises(ConfigError, match="requires a tokenizer"):
        engine.embed(["text"])
    with pytest.raises(ConfigError, match=r"request.pooling must be .*'last'.*'mean'.* not 'first'"):
        engine.embed([(6,)], pooling="first")
    with pytest.raises(ConfigError, match=r"its options must be SamplingOptions\(max_tokens=1\)"):
        Request((6,), SamplingOptions(max_tokens=2), pooling="last")
    assert engine.embed([]) == []


def test_texts_are_tokenized(model):
    tokenizer = ByteTokenizer.Config().build()
    cfg = ax.select(tiny_model(), "").set(vocab_size=tokenizer.vocab_size)
    model = ax.pipe(cfg, ax.use("rope")).build(rngs=ax.Rngs(0))
    with Engine.Config(max_len=16, max_rows=1).build(model, tokenizer) as engine:
        text, ids = engine.embed(["abc", engine.request("abc").ids])
        np.testing.assert_array_equal(text, ids)


def test_weights_that_are_not_finite_are_an_error(model):
    fn, params, state = functional(model)
    params = {**params, "norm": {name: array * np.nan for name, array in params["norm"].items()}}
    cfg = Engine.Config(max_len=16, max_rows=1)
    with cfg.build(fn.bind(params, state)) as engine, pytest.raises(ax.AxcoreError, match="states are not finite"):
        engine.embed([(6, 7)])


class Renamed(Layer):
    """A model whose norm has another name."""

    class Config(Layer.Config):
        inner: Layer.Config

    def __init__(self, cfg, *, rngs):
        self.inner = self.child("inner", cfg.inner, rngs)

    def __call__(self, ids, *args, **kwargs):
        return self.inner(ids, *args, **kwargs)


def test_a_model_without_hidden_states_is_refused():
    model = Renamed.Config(inner=ax.pipe(tiny_model(), ax.use("rope"))).build(rngs=ax.Rngs(0))
    with Engine.Config(max_len=16, max_rows=1).build(model) as engine:
        for call in (lambda: engine.embed([(6,)]), lambda: engine.warm_up(embeddings=True)):
            with pytest.raises(ConfigError, match="has no layer `norm`"):
                call()
        assert engine.generate([Request((6,), SamplingOptions(max_tokens=2, ignore_eos=True))])[0].ids


@pytest.mark.long
def test_penalties_count_all_tokens_of_a_row_that_comes_back_to_an_earlier_slot(model):
    """Requests for embeddings take the slots of a sample meanwhile, and sample nothing there."""
    (ids, filling), usual = prompts((3, 3)), {"temperature": 0.0, "ignore_eos": True}
    penalized = Request(ids, SamplingOptions(max_tokens=24, frequency_penalty=3.0, **usual), priority=1)
    embedded = Request(tuple(range(6, 23)), SamplingOptions(max_tokens=1), pooling="last")
    cfg = Engine.Config(max_len=40, max_rows=2, step_tokens=4)
    with cfg.build(model) as engine:
        (expected,) = engine.generate([penalized])
    pieces, ended = [], queue.SimpleQueue()

    def deliver(piece):
        pieces.append(piece)
        if len(pieces) in (3, 6, 9):  # the sample goes from slot 1 to 0 and back, since its priority is lower
            engine.submit(embedded, lambda _: None)
        if piece.finish_reason is not None:
            ended.put(None)

    with cfg.build(model) as engine:
        engine.submit(penalized, deliver)
        engine.submit(Request(filling, SamplingOptions(max_tokens=6, **usual)), lambda _: None)
        ended.get(timeout=60)
        assert engine.stats.preempted == 2
    assert tuple(id for piece in pieces for id in piece.ids) == expected.ids
