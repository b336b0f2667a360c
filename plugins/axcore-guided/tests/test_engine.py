"""Samples of an engine follow their grammars, whatever runs beside them."""

import asyncio
import json
import re
import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from axcore.config import AxcoreError
from axcore.infer import Engine, Grammar, SamplingOptions
from axcore.infer.speculation import NGram
from axcore_guided.compiler import LLGuidance, Matcher
from axcore_paged_kv.cache import PagedCache

from .expressions import NOTHING, accepts, regexes, schemas
from .support import END, TOKENIZER, guided_engine

FREE = SamplingOptions(max_tokens=24, seed=3)


def guided(grammar, **options):
    return SamplingOptions(**{"max_tokens": 24, "seed": 3, "grammar": grammar} | options)


def texts(engine, asked):
    return engine.generate([engine.request("once upon a time", options) for options in asked])


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(regexes, st.sampled_from([0.0, 1.0])), min_size=1, max_size=6), st.integers(0, 2**31))
def test_texts_match_their_regular_expressions(engine, chosen, seed):
    asked = [guided(Grammar.regex(each.pattern), temperature=hot, seed=seed) for each, hot in chosen]
    for (regex, _), piece in zip(chosen, texts(engine, asked), strict=True):
        rest = regex.after_text(piece.text)
        if piece.finish_reason == "stop":
            assert rest.is_nullable and re.fullmatch(regex.pattern, piece.text)
        else:
            assert piece.finish_reason == "length" and rest != NOTHING and len(piece.ids) == 24


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(st.lists(schemas, min_size=1, max_size=4), st.integers(0, 2**31))
def test_texts_match_their_schemas(engine, chosen, seed):
    asked = [guided(Grammar.json_schema(schema), max_tokens=79, seed=seed) for schema in chosen]
    for schema, piece in zip(chosen, texts(engine, asked), strict=True):
        if piece.finish_reason == "stop":
            assert accepts(schema, json.loads(piece.text)), (schema, piece.text)
        else:
            assert len(piece.ids) == 79


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_allows_everything_changes_nothing(engine, temperature):
    ascii_only = {id: -100.0 for id in range(128, TOKENIZER.vocab_size) if id != END}  # a grammar matches UTF-8
    for seed in range(4):
        options = {"temperature": temperature, "seed": seed, "max_tokens": 30, "logprobs": 2, "logit_bias": ascii_only}
        free, same = texts(engine, [SamplingOptions(**options), guided(Grammar.regex("(?s).*"), **options)])
        assert (free.ids, free.finish_reason) == (same.ids, same.finish_reason)
        found, expected = ([each.logprob for each in piece.logprobs] for piece in (same, free))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_rows_without_a_grammar_do_not_change_beside_guided_ones(engine):
    alone = texts(engine, [FREE])[0]
    digits = guided(Grammar.regex("[0-9]{20}"))
    found = texts(engine, [digits, FREE, digits, SamplingOptions(max_tokens=24, temperature=0.0)])
    assert (found[1].ids, found[1].text) == (alone.ids, alone.text)
    assert found[3].ids == texts(engine, [SamplingOptions(max_tokens=24, temperature=0.0)])[0].ids
    assert found[0].ids == found[2].ids and re.fullmatch("[0-9]{20}", found[0].text)


@pytest.mark.long
def test_grammars_hold_for_drafts(engine, model):
    """Drafts that the grammar excludes, that end it and that follow its end change no token."""
    grammars = [
        Grammar.regex("(abc){8}"),
        Grammar.regex("[0-9]{1,20}"),
        Grammar.regex("(a|b){3,}c"),
        Grammar.choice(["yes yes yes", "no no no"]),
        Grammar.json_schema({"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 6}),
    ]
    asked = [
        *(guided(each, temperature=hot, seed=seed) for each in grammars for hot in (0.0, 1.0) for seed in range(2)),
        FREE,
    ]
    expected = texts(engine, asked)
    with guided_engine(model, speculation=NGram.Config(prompt_lookup_min=1, num_speculative_tokens=3)) as drafting:
        found = texts(drafting, asked)
        assert 0 < drafting.stats.accepted_tokens < drafting.stats.draft_tokens
    assert [(each.ids, each.text, each.finish_reason) for each in found] == [
        (each.ids, each.text, each.finish_reason) for each in expected
    ]


def test_samples_of_a_request_follow_the_grammar_apart(engine):
    request = engine.request("a", guided(Grammar.regex("[a-z]{4}[0-9]{4}")))
    streams = [engine.stream(request, sample=index) for index in range(6)]
    found = [stream.result().text for stream in streams]
    assert len(set(found)) == 6 and all(re.fullmatch("[a-z]{4}[0-9]{4}", each) for each in found)


def test_a_sample_ends_where_nothing_may_follow_without_an_end_token(engine):
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"max_tokens": 3}):
        (piece,) = texts(engine, [guided(Grammar.choice(["yes", "yes"]), **options)])
        assert (piece.text, piece.finish_reason, len(piece.ids)) == ("yes", "stop", 3)


def test_end_tokens_are_sampled_only_where_the_grammar_is_complete(engine):
    bias = {END: 100.0}
    (piece,) = texts(engine, [guided(Grammar.regex("(ab)+"), logit_bias=bias)])
    assert (piece.text, piece.finish_reason, piece.ids[-1]) == ("ab", "stop", END)
    (piece,) = texts(engine, [guided(Grammar.regex("(ab)+"), logit_bias=bias, min_tokens=3)])
    assert (piece.text, piece.finish_reason, piece.ids[-1]) == ("abab", "stop", END)
    (piece,) = texts(engine, [guided(Grammar.regex("(ab)+"), ignore_eos=True, max_tokens=7)])
    assert (piece.text, piece.finish_reason) == ("abababa", "length")


def test_stop_tokens_without_text_are_end_tokens_and_those_with_text_end_anywhere(engine):
    silent = 260
    bias = {silent: 100.0, END: -100.0}
    (piece,) = texts(engine, [guided(Grammar.regex("(ab)+"), logit_bias=bias, stop_token_ids=(silent,))])
    assert (piece.text, piece.ids[-1]) == ("ab", silent)
    (piece,) = texts(engine, [guided(Grammar.regex("(ab)+"), logit_bias=bias)])
    assert silent not in piece.ids
    (piece,) = texts(engine, [guided(Grammar.regex("(ab)+c"), stop_token_ids=(ord("b"),))])
    assert (piece.text, piece.finish_reason) == ("ab", "stop")


def test_stop_strings_end_a_sample_before_its_grammar_is_complete(engine):
    (piece,) = texts(engine, [guided(Grammar.regex("abcdef"), stop=("cd",))])
    assert (piece.text, piece.finish_reason) == ("ab", "stop")


def test_a_grammar_without_an_end_runs_to_the_length(engine):
    (piece,) = texts(engine, [guided(Grammar("lark", 'start: "a" start'))])
    assert (piece.text, piece.finish_reason) == ("a" * 24, "length")


def test_options_that_exclude_every_token_of_the_grammar_end_only_their_sample(engine):
    stuck = engine.stream(engine.request("a", guided(Grammar.regex("xy"), logit_bias={ord("y"): -3e38})))
    free = engine.stream(engine.request("once upon a time", FREE))
    assert stuck.result().text == "xy"  # a bias does not exclude
    with pytest.raises(
        AxcoreError, match=r"no token can be sampled: .* or the grammar, logit_bias and min_tokens exclude every"
    ):
        texts(engine, [guided(Grammar.regex("xb"), stop_token_ids=(ord("x"),), min_tokens=3)])
    assert free.result().ids == texts(engine, [FREE])[0].ids


@pytest.mark.parametrize("pages", [None, 12])
def test_preempted_samples_continue_in_their_grammar(model, engine, pages):
    """Each sample takes a third of the pages that three have together, so that they preempt each other."""
    asked = [guided(Grammar.regex("([a-f]{3}-[0-9]{2}/){9}"), seed=seed, max_tokens=28) for seed in range(3)]
    cache = PagedCache.Config(page_size=4, num_pages=pages) if pages else PagedCache.Config(page_size=4, num_pages=60)
    with guided_engine(model, cache=cache, max_len=48) as small:
        found = texts(small, asked)
        assert (small.stats.preempted > 0) == (pages is not None)
    assert [piece.ids for piece in found] == [piece.ids for piece in texts(engine, asked)]
    assert all(re.fullmatch("([a-f]{3}-[0-9]{2}/)*[^/]*", piece.text) for piece in found)


def test_asyncio_consumers_wait_without_blocking_others(model, monkeypatch):
    """A grammar that takes long to compile delays its own request only."""
    entered, released, compile = threading.Event(), threading.Event(), LLGuidance.compile

    def slow(self, grammar):
        if grammar.text == "slow":
            entered.set()
            assert released.wait(60)
        return compile(self, grammar)

    monkeypatch.setattr(LLGuidance, "compile", slow)

    async def whole(engine, options):
        pieces = [piece async for piece in engine.astream(engine.request("a", options))]
        return "".join(piece.text for piece in pieces)

    async def both():
        with guided_engine(model) as engine:
            waits = asyncio.create_task(whole(engine, guided(Grammar.regex("slow"))))
            assert await asyncio.to_thread(entered.wait, 60)
            assert await whole(engine, guided(Grammar.regex("fast"))) == "fast"
            assert not waits.done()
            released.set()
            return await waits

    assert asyncio.run(both()) == "slow"


def test_a_matcher_that_fails_ends_only_its_sample(engine, monkeypatch):
    accept = Matcher.accept

    def failing(self, token):
        if token == ord("!"):
            raise AxcoreError("the grammar cannot continue: too complex")
        accept(self, token)

    monkeypatch.setattr(Matcher, "accept", failing)
    streams = [engine.stream(engine.request("a", guided(Grammar.regex(each)))) for each in ("ab!c", "abcd")]
    with pytest.raises(AxcoreError, match="the grammar cannot continue: too complex"):
        streams[0].result()
    assert streams[1].result().text == "abcd"
    assert engine.stats.running == engine.stats.waiting == 0


@pytest.mark.parametrize("wrong", ["late", "shifted"])
def test_wrong_masks_are_noticed(engine, monkeypatch, wrong):
    """Without this, a sample that left its grammar would end as if nothing had happened."""
    allowed = Matcher.allowed

    def changed(self):
        words = allowed(self)
        if wrong == "late":
            words, self.before = getattr(self, "before", words), words
            return words
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return np.packbits(np.roll(bits, 1), bitorder="little").view(np.int32)

    monkeypatch.setattr(Matcher, "allowed", changed)
    with pytest.raises(AxcoreError, match=r"the grammar cannot continue: .* doesn't satisfy the grammar"):
        texts(engine, [guided(Grammar.regex("abcdefgh"))])


@pytest.mark.long
@pytest.mark.parametrize("cache", [{}, {"cache": PagedCache.Config(page_size=4, num_pages=24)}], ids=["slots", "pages"])
def test_nothing_compiles_after_the_warm_up(model, cache):
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.append(name) if name.endswith("backend_compile_duration") else None
    )
    fields = {"max_len": 32, "max_rows": 2, "step_tokens": 16, "grammars": LLGuidance.Config(), **cache}
    with Engine.Config(**fields).build(model, TOKENIZER, eos_ids=(END,)) as engine:
        engine.warm_up()
        compiled = engine.stats.compiled
        events.clear()
        free, digits = SamplingOptions(max_tokens=8), Grammar.regex("[0-9]+")
        asked = [free, guided(digits, max_tokens=8), free, guided(digits, max_tokens=5, logprobs=3, temperature=0.0)]
        texts(engine, asked * 2)
        assert (engine.stats.compiled - compiled, events) == (0, [])
