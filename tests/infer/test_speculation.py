"""An engine with drafts gives the tokens of one without, whatever the drafts are."""

import random

import numpy as np
import pytest

import axcore as ax
from axcore.config import ConfigError
from axcore.infer import Engine, Request, SamplingOptions
from axcore.infer.speculation import Drafter, NGram
from axcore.infer.speculation.ngram import NGram as NGramDrafter
from axcore.testing.models import VOCAB_SIZE, tiny_model
from axcore.train.data import ByteTokenizer
from axcore_paged_kv.cache import PagedCache

LONG = pytest.mark.long
MAX_LEN = 48
CACHES = {"contiguous": {}, "paged": {"cache": PagedCache.Config(page_size=4, num_pages=24)}}
OPTIONS = (
    SamplingOptions(temperature=0.0, max_tokens=13),
    SamplingOptions(temperature=0.4, seed=3, max_tokens=12, ignore_eos=True),
    SamplingOptions(
        temperature=0.6,
        seed=4,
        top_k=6,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.1,
        logit_bias={7: 2.0},
        min_tokens=8,
        logprobs=2,
        max_tokens=14,
    ),
)


class Scripted(Drafter):
    """Drafts of a known output, in which a part of the tokens is wrong."""

    class Config(Drafter.Config):
        known: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
        """Prompts and their outputs."""
        percent_right: int = 80

    config: Config

    def propose(self, sequences, seeds):
        return {each.id: self.drafts(each) for each in sequences}

    def drafts(self, sequence):
        known, rng = dict(self.config.known).get(sequence.request.ids, ()), random.Random(str(sequence.tokens))
        future = known[sequence.num_output : sequence.num_output + self.config.num_speculative_tokens]
        is_right = [rng.randrange(100) < self.config.percent_right for _ in future]
        return tuple(
            token if right else rng.randrange(VOCAB_SIZE) for token, right in zip(future, is_right, strict=True)
        )


@pytest.fixture(scope="module")
def model():
    cfg = ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0))
    return ax.pipe(cfg, ax.use("rope")).build(rngs=ax.Rngs(0))


def prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(6, VOCAB_SIZE, length).tolist()) for length in lengths]


def answers(model, asked, speculation=None, *, together=True, **fields):
    """The pieces of some requests, and the counters of the engine afterwards."""
    cfg = Engine.Config(**{"max_len": MAX_LEN, "max_rows": 3, "step_tokens": 20} | fields, speculation=speculation)
    with cfg.build(model, eos_ids=(5,)) as engine:
        if together:
            return engine.generate(asked), engine.stats
        return [engine.generate([each])[0] for each in asked], engine.stats


def known_outputs(asked, pieces):
    return tuple((each.ids, piece.ids) for each, piece in zip(asked, pieces, strict=True))


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.ids, one.finish_reason) == (other.ids, other.finish_reason)
        assert (one.logprobs is None) == (other.logprobs is None)
        for left, right in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert (left.id, left.rank) == (right.id, right.rank)
            np.testing.assert_allclose(left.logprob, right.logprob, atol=1e-4)


@pytest.fixture(scope="module")
def expected(model):
    """Requests with prompts of lengths around page boundaries and chunks, and their pieces without drafts."""
    asked = [Request(ids, OPTIONS[at % 3]) for at, ids in enumerate(prompts((1, 2, 4, 5, 7, 8, 9, 16, 17, 20, 21, 34)))]
    return asked, answers(model, asked)[0]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(NGram.Config(prompt_lookup_min=1), id="ngram", marks=LONG),
        pytest.param(Scripted.Config(), id="often right"),
        pytest.param(Scripted.Config(percent_right=100, num_speculative_tokens=5), id="right", marks=LONG),
        pytest.param(Scripted.Config(percent_right=10, num_speculative_tokens=1), id="often wrong", marks=LONG),
    ],
)
def test_tokens_are_those_without_drafts(model, expected, cache, drafter):
    asked, pieces = expected
    if isinstance(drafter, Scripted.Config):  # some rows have no drafts
        drafter = drafter.set(known=known_outputs(asked[1:], pieces[1:]))
    found, stats = answers(model, asked, drafter, **CACHES[cache])
    assert_equal(found, pieces)
    assert 0 < stats.accepted_tokens < stats.draft_tokens or getattr(drafter, "percent_right", 0) == 100
    assert stats.tokens == sum(len(piece.ids) for piece in pieces)
    assert stats.pages is None or stats.pages.live == 0


@pytest.mark.parametrize("cache", [pytest.param("contiguous", marks=LONG), "paged"])
def test_one_row_needs_a_step_for_each_rejected_draft_only(model, cache):
    """In a single row, n tokens with right drafts take (n - 1) / (1 + k) steps after the prompt."""
    (ids,) = prompts((6,), seed=1)
    request = Request(ids, SamplingOptions(temperature=0.0, max_tokens=31, ignore_eos=True))
    (alone,), slow = answers(model, [request], max_rows=1, **CACHES[cache])
    drafter = Scripted.Config(known=((ids, alone.ids),), percent_right=100)
    (found,), fast = answers(model, [request], drafter, max_rows=1, **CACHES[cache])
    assert found.ids == alone.ids and len(found.ids) == 31
    assert (slow.steps, fast.steps) == (31, 1 + 6)
    assert (fast.draft_tokens, fast.accepted_tokens) == (24, 24)


@LONG
def test_sequences_that_are_preempted_and_share_prefixes_get_the_same_tokens(model, expected):
    asked, pieces = expected
    known = known_outputs(asked, pieces)
    cache = PagedCache.Config(page_size=4, num_pages=14)
    for drafter in (NGram.Config(prompt_lookup_min=1), Scripted.Config(known=known)):
        found, stats = answers(model, [*asked, *asked], drafter, cache=cache)
        assert_equal(found, [*pieces, *pieces])
        assert stats.preempted > 0 and stats.cached_tokens > 0


def test_stops_cut_accepted_drafts(model):
    """Stop tokens and stop strings in the middle of accepted drafts."""
    text_model = ax.select(tiny_model(), "").set(vocab_size=ByteTokenizer.Config().build().vocab_size)
    text_model = ax.pipe(text_model, ax.use("rope")).build(rngs=ax.Rngs(1))
    tokenizer = ByteTokenizer.Config().build()
    ids = tuple(tokenizer.prompt(b"abcabc").tolist())
    free = SamplingOptions(temperature=1.0, seed=1, max_tokens=24)
    cfg = Engine.Config(max_len=MAX_LEN, max_rows=2, step_tokens=20)
    with cfg.build(text_model, tokenizer) as engine:
        known = engine.generate([Request(ids, free)])[0].ids
        printable = next(at for at in range(7, 24) if 32 < known[at] < 127 and known[at] not in known[:at])
        options = [
            SamplingOptions(**{**vars(free), "stop_token_ids": (known[printable],)}),
            SamplingOptions(**{**vars(free), "stop": (chr(known[printable]),)}),
            SamplingOptions(**{**vars(free), "max_tokens": 8}),
        ]
        asked = [Request(ids, each) for each in options]
        expected = engine.generate(asked)
    drafter = Scripted.Config(known=((ids, known),), percent_right=100)
    with cfg.set(speculation=drafter).build(text_model, tokenizer) as engine:
        streams = [[piece for piece in engine.stream(each)] for each in asked]
        found = engine.generate(asked)
        assert engine.stats.tokens == 2 * sum(len(each.ids) for each in expected)
    assert_equal(found, expected)
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.finish_reason for each in found] == ["stop", "stop", "length"]
    assert [len(each.ids) for each in found] == [printable + 1, printable + 1, 8]
    for pieces, whole in zip(streams, expected, strict=True):
        assert [id for piece in pieces for id in piece.ids] == list(whole.ids)
        assert "".join(piece.text for piece in pieces) == whole.text and len(pieces) < len(whole.ids)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], (4, 9, 1)),
        ([1, 2, 3, 4, 2, 3, 7, 1, 2, 3], (4, 2, 3)),  # the longest match, not the last one
        ([2, 3, 4, 2, 3, 7, 8, 2, 3], (7, 8, 2)),  # of two matches, the last one
        ([5, 6, 5, 6], (5, 6, 5)),  # repeats
        ([4, 4, 4], (4, 4, 4)),
        ([1, 2, 3, 1], ()),  # shorter than prompt_lookup_min
        ([1, 2, 3, 4], ()),
        ([1], ()),
        ([256, 1, 1, 256, 0, 1], ()),  # 256 and 1 share bytes with other tokens
    ],
)
def test_ngram_drafts_what_followed_the_last_tokens(tokens, drafts):
    cfg = NGram.Config(num_speculative_tokens=3, prompt_lookup_max=3)
    assert NGramDrafter(cfg, None).continuation(tokens) == drafts


def test_ngram_agrees_with_a_direct_search():
    rng = random.Random(0)
    cfg = NGram.Config(num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=1)
    drafter = NGramDrafter(cfg, None)
    for _ in range(300):
        tokens = [rng.choice([0, 1, 256, 65536 + 256]) for _ in range(rng.randint(1, 40))]
        wanted = ()
        for length in range(min(4, len(tokens) - 1), 0, -1):
            places = [at for at in range(len(tokens) - length) if tokens[at : at + length] == tokens[-length:]]
            if places:
                row = tokens + [None] * 5
                for each in range(5):
                    row[len(tokens) + each] = row[places[-1] + length + each]
                wanted = tuple(row[len(tokens) :])
                break
        assert drafter.continuation(tokens) == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"step_tokens": 14},
            r"num_speculative_tokens=4: max_rows=3 rows of 5 tokens exceed engine.step_tokens=14. .* 15",
        ),
        (
            {"speculation": NGram.Config(prompt_lookup_min=5)},
            "engine.speculation.prompt_lookup_min=5 must be at most prompt_lookup_max=4",
        ),
    ],
)
def test_wrong_configs_are_refused(model, fields, message):
    cfg = Engine.Config(
        **{"max_len": MAX_LEN, "max_rows": 3, "step_tokens": 20, "speculation": NGram.Config()} | fields
    )
    with pytest.raises(ConfigError, match=message):
        cfg.build(model)


@LONG
@pytest.mark.parametrize("cache", CACHES)
def test_nothing_compiles_after_the_warm_up(model, cache):
    cfg = Engine.Config(max_len=32, max_rows=2, step_tokens=16, speculation=NGram.Config(), **CACHES[cache])
    asked = [Request((6, 7) * 4, SamplingOptions(**{**vars(each), "max_tokens": 14})) for each in OPTIONS]
    with cfg.build(model, eos_ids=(5,)) as engine:
        engine.warm_up()
        compiled = engine.stats.compiled
        engine.generate([*asked, *asked[:1]])
        assert engine.stats.compiled == compiled and engine.stats.draft_tokens > 0
