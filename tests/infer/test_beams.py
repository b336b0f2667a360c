"""Beam search finds what full recomputation in float64 finds."""

import itertools
import math

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.config import ConfigError
from axcore.infer import BeamOptions, Engine
from axcore.infer.beams import BeamSearch
from axcore.module import functional
from axcore.testing.models import VOCAB_SIZE, tiny_model
from axcore.train.data import ByteTokenizer
from axcore_paged_kv.cache import PagedCache

EOS = 5
CACHES = {"contiguous": {}, "paged": {"cache": PagedCache.Config(page_size=4, num_pages=64)}}


@pytest.fixture(scope="module", params=CACHES)
def engine(request, model):
    cfg = Engine.Config(max_len=40, max_rows=4, step_tokens=20, **CACHES[request.param])
    with cfg.build(model, eos_ids=(EOS,)) as engine:
        yield engine


@pytest.fixture(scope="module")
def logprobs(model):
    """The float64 log-probabilities of the token after `ids`, by one call of the model."""
    fn, params, state = functional(model)
    call = jax.jit(lambda row: fn(params, state, row[None])[0][0][0])
    known = {}

    def found(ids):
        if ids not in known:
            row = np.zeros(40, np.int32)
            row[: len(ids)] = ids
            logits = np.asarray(call(row))[len(ids) - 1].astype(np.float64)
            known[ids] = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        return known[ids]

    return found


def reference(logprobs, prompt, beams, max_tokens, penalty, early, ends):
    """[(tokens, score)], by a search over all tokens of the vocabulary."""
    running, sums, finished = [()], np.zeros(1), []
    for length in range(1, max_tokens + 1):
        table = sums[:, None] + np.stack([logprobs((*prompt, *ids)) for ids in running])
        order = np.argsort(-table, axis=None, kind="stable")
        ranked = [(table.flat[at], (*running[at // table.shape[1]], int(at % table.shape[1]))) for at in order]
        for total, ids in ranked[:beams]:
            if ids[-1] in ends or length == max_tokens:
                finished.append((ids, total / length**penalty))
        finished = sorted(finished, key=lambda each: -each[1])[:beams]
        best = [(total, ids) for total, ids in ranked if ids[-1] not in ends][:beams]
        running, sums = [ids for _, ids in best], np.array([total for total, _ in best])
        if len(finished) == beams:
            at_best = sums[0] / (max_tokens if early == "never" and penalty > 0 else length) ** penalty
            if early is True or at_best <= finished[-1][1]:
                break
    return finished


@pytest.mark.long
@pytest.mark.parametrize(
    ("beams", "max_tokens", "penalty", "early"),
    [(1, 6, 1.0, False), (3, 8, 1.0, False), (4, 7, 0.0, True), (4, 7, 2.0, "never"), (6, 5, -1.0, False)],
)
def test_outputs_and_scores_are_those_of_full_recomputation(engine, logprobs, beams, max_tokens, penalty, early):
    random, stops = np.random.default_rng(beams), (7, 8, 9)
    prompts = [tuple(random.integers(6, VOCAB_SIZE, length).tolist()) for length in (1, 3, 4, 5, 17)]
    options = BeamOptions(
        num_beams=beams, max_tokens=max_tokens, length_penalty=penalty, early_stopping=early, stop_token_ids=stops
    )
    reasons = set()
    for prompt, found in zip(prompts, engine.beam_search(prompts, options), strict=True):
        expected = reference(logprobs, prompt, beams, max_tokens, penalty, early, {EOS, *stops})
        assert [beam.ids for beam in found] == [ids for ids, _ in expected]
        np.testing.assert_allclose([beam.score for beam in found], [score for _, score in expected], atol=1e-4)
        for beam in found:
            assert beam.score == pytest.approx(beam.logprob / len(beam.ids) ** penalty)
            assert beam.finish_reason == ("stop" if beam.ids[-1] in {EOS, *stops} else "length")
            reasons.add(beam.finish_reason)
    assert reasons == {"stop", "length"} or beams == 1
    assert engine.stats.running == engine.stats.waiting == 0


@pytest.mark.long
def test_as_many_beams_as_tokens_find_the_best_of_all_outputs(engine, logprobs):
    prompt = (6, 11, 9)
    options = BeamOptions(num_beams=VOCAB_SIZE, max_tokens=2, length_penalty=0.0, ignore_eos=True)
    scores = {
        (first, second): logprobs(prompt)[first] + logprobs((*prompt, first))[second]
        for first, second in itertools.product(range(VOCAB_SIZE), repeat=2)
    }
    best = sorted(scores, key=lambda ids: -scores[ids])[:VOCAB_SIZE]
    (found,) = engine.beam_search([prompt], options)
    assert [beam.ids for beam in found] == best
    np.testing.assert_allclose([beam.logprob for beam in found], [scores[ids] for ids in best], atol=1e-4)


@pytest.mark.long
def test_with_pages_a_step_computes_less_than_a_page_of_each_output(model):
    cfg = Engine.Config(max_len=64, max_rows=4, step_tokens=64, **CACHES["paged"])
    with cfg.build(model) as engine:
        engine.beam_search([(6,) * 32], BeamOptions(num_beams=4, max_tokens=12))
        stats = engine.stats
    assert stats.tokens == 1 + 11 * 4
    assert stats.prompt_tokens - stats.cached_tokens <= 32 + 11 * 4 * 4


@pytest.mark.long
def test_nothing_compiles_after_warm_up_and_texts_have_texts(model):
    tokenizer = ByteTokenizer.Config().build()
    cfg = ax.select(tiny_model(), "").set(vocab_size=tokenizer.vocab_size)
    model = ax.pipe(cfg, ax.use("rope")).build(rngs=ax.Rngs(0))
    with Engine.Config(max_len=16, max_rows=2).build(model, tokenizer) as engine:
        engine.warm_up(["greedy"])
        compiled = engine.stats.compiled
        text, ids = engine.beam_search(["abc", engine.request("abc").ids], BeamOptions(num_beams=3, max_tokens=4))
        assert engine.stats.compiled == compiled
        assert text == ids and any(beam.text for beam in text)
        for beam in text:
            assert beam.text == tokenizer.decode(np.array(beam.ids)).decode(errors="replace")


def ranked(*logprobs):
    return [tuple(enumerate(logprobs))]


def test_end_tokens_beyond_the_best_beams_do_not_finish_and_do_not_displace():
    options = BeamOptions(num_beams=2, max_tokens=9)
    search = BeamSearch(options, stop_token_ids=(2,))
    assert search.num_candidates == 3
    search.advance(ranked(-1.0, -2.0, -3.0))  # the end token is the third
    assert search.finished == [] and search.unfinished == [(0,), (1,)]
    search.advance([((2, -0.1), (0, -5.0), (1, -6.0)), ((2, -0.5), (0, -5.5), (1, -7.0))])
    assert [beam.ids for beam in search.finished] == [(0, 2), (1, 2)]
    assert search.unfinished == []  # no unfinished output is better at its length


def test_equal_scores_keep_the_order_of_beams_and_tokens():
    search = BeamSearch(BeamOptions(num_beams=2, max_tokens=3))
    search.advance(ranked(-1.0, -1.0))
    search.advance([((1, -1.0), (0, -1.0))] * 2)
    assert search.unfinished == [(0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_beams": 0}, "beams.num_beams must be .*at least 1.* not 0. Use 4"),
        ({"max_tokens": 0}, "beams.max_tokens must be"),
        ({"length_penalty": math.nan}, "beams.length_penalty must be"),
        ({"early_stopping": "always"}, "beams.early_stopping must be .*never.* not 'always'"),
        ({"stop_token_ids": (-1,)}, "beams.stop_token_ids must be"),
    ],
)
def test_bad_options_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        BeamOptions(**{"max_tokens": 4, **wrong})


def test_searches_that_do_not_fit_are_refused(engine):
    with pytest.raises(ConfigError, match=r"max_tokens=40 and a prompt of 1 tokens exceed 40 tokens"):
        engine.beam_search([(6,)], BeamOptions(max_tokens=40))
    with pytest.raises(ConfigError, match=f"logprobs={VOCAB_SIZE + 1} must be at most {VOCAB_SIZE}"):
        engine.beam_search([(6,)], BeamOptions(max_tokens=2, num_beams=VOCAB_SIZE))
    with pytest.raises(ConfigError, match="must have at least one token"):
        engine.beam_search([()], BeamOptions(max_tokens=2))
    assert engine.beam_search([], BeamOptions(max_tokens=2)) == []
