"""An engine with drafts gives the tokens of one without, whatever the drafts are."""

import random

import jax
import numpy as np
import pytest
from flax import nnx

import axcore as ax
from axcore.config import AxcoreError, ConfigError
from axcore.infer import Engine, Request, SamplingOptions
from axcore.infer.speculation import MTP, Drafter, DraftModel, NGram
from axcore.infer.speculation.ngram import NGram as NGramDrafter
from axcore.module import functional
from axcore.nn import DecodingState, Linear, MultiTokenPrediction
from axcore.testing.models import VOCAB_SIZE, shrunk, tiny_model
from axcore.train.data import ByteTokenizer
from axcore_paged_kv.cache import PagedCache
from axcore_ring_kv.cache import RingCache

LONG, SLOW = pytest.mark.long, pytest.mark.slow
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


def prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(6, VOCAB_SIZE, length).tolist()) for length in lengths]


def answers(model, asked, speculation=None, *, draft_model=None, **fields):
    """The pieces of some requests, and the counters of the engine afterwards."""
    cfg = Engine.Config(**{"max_len": MAX_LEN, "max_rows": 3, "step_tokens": 20} | fields, speculation=speculation)
    with cfg.build(model, eos_ids=(5,), draft_model=draft_model) as engine:
        return engine.generate(asked), engine.stats


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
        pytest.param(NGram.Config(prompt_lookup_min=1), id="ngram", marks=SLOW),
        pytest.param(Scripted.Config(), id="often right"),
        pytest.param(Scripted.Config(percent_right=100, num_speculative_tokens=5), id="right", marks=SLOW),
        pytest.param(Scripted.Config(percent_right=10, num_speculative_tokens=1), id="often wrong", marks=SLOW),
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


@pytest.mark.parametrize("cache", [pytest.param("contiguous", marks=SLOW), "paged"])
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
        found, stats = answers(model, [each for each in asked for _ in range(2)], drafter, cache=cache)
        assert_equal(found, [each for each in pieces for _ in range(2)])
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


def noisy(model, stddev):
    """A copy of a model with noise in every parameter."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [x + stddev * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(structure, leaves), rest)


@pytest.mark.parametrize("cache", [pytest.param("contiguous", marks=SLOW), "paged"])
@pytest.mark.parametrize(("stddev", "least", "most"), [pytest.param(0.0, 0.98, 1.0, marks=SLOW), (0.03, 0.15, 0.97)])
def test_a_draft_model_changes_no_token(model, expected, cache, stddev, least, most):
    asked, pieces = expected
    cfg = DraftModel.Config(num_speculative_tokens=3)
    found, stats = answers(model, asked, cfg, draft_model=noisy(model, stddev), **CACHES[cache])
    assert_equal(found, pieces)
    plain = [each for at, each in enumerate(asked) if at % 3 < 2]  # drafts have no penalties
    again, stats = answers(model, plain, cfg, draft_model=noisy(model, stddev), **CACHES[cache])
    assert [each.ids for each in again] == [each.ids for at, each in enumerate(pieces) if at % 3 < 2]
    assert least <= stats.accepted_tokens / stats.draft_tokens <= most


@pytest.fixture(scope="module")
def predicting():
    """A model with a module for multi-token prediction."""
    cfg = ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0))
    cfg = cfg.set(future=(MultiTokenPrediction.Config(layer=cfg.decoder.layers),))
    return ax.pipe(cfg, ax.use("rope")).build(rngs=ax.Rngs(0))


@pytest.mark.parametrize("cache", [pytest.param("contiguous", marks=SLOW), "paged"])
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=SLOW)])
def test_multi_token_prediction_drafts_what_the_module_predicts(predicting, monkeypatch, cache, count):
    """Its first drafts are those of full recomputation in training, also after rejected drafts and in reused slots."""
    fn, params, state = functional(predicting)

    @jax.jit
    def predicted(row):
        def call(model):
            blank = {"inputs": row[None], "targets": row[None], "weights": np.ones((1, MAX_LEN), np.float32)}
            return model.logits(model.predictions(blank)[1].hidden)

        return fn(params, state, method=call)[0][0][0].argmax(axis=-1)

    drafted, propose = [], MTP.propose

    def recorded(self, sequences, seeds):
        found = propose(self, sequences, seeds)
        drafted.extend((list(each.tokens), found[each.id]) for each in sequences)
        return found

    asked = [Request(ids, OPTIONS[at % 2]) for at, ids in enumerate(prompts((2, 9, 20, 5, 17, 34)))]
    expected, _ = answers(predicting, asked, **CACHES[cache])
    monkeypatch.setattr(MTP, "propose", recorded)
    found, stats = answers(predicting, asked, MTP.Config(num_speculative_tokens=count), **CACHES[cache])
    assert_equal(found, expected)
    assert 0 < stats.accepted_tokens < stats.draft_tokens and stats.cached_tokens == 0
    greedy = {request.ids for request in asked if request.options.temperature == 0}
    compared = 0
    for tokens, drafts in drafted[::2]:
        if any(tuple(tokens[: len(ids)]) == ids for ids in greedy):
            row = np.zeros(MAX_LEN, np.int32)
            row[: len(tokens)] = tokens
            assert drafts[0] == predicted(row)[len(tokens) - 2] and len(drafts) == count
            compared += 1
    assert compared > 5


def test_models_without_modules_for_multi_token_prediction_are_refused(model, predicting):
    cfg = Engine.Config(max_len=MAX_LEN, max_rows=3, step_tokens=20, speculation=MTP.Config())
    with pytest.raises(ConfigError, match=r"the model has no modules for multi-token prediction \(model.future\)"):
        cfg.build(model)
    with pytest.raises(ConfigError, match=r"engine.prefix_caching=True: engine.speculation reads the hidden states"):
        cfg.set(prefix_caching=True, **CACHES["paged"]).build(predicting)
    with pytest.raises(ConfigError, match=r"engine.burst_tokens=40: engine.speculation reads the hidden states"):
        cfg.set(burst_tokens=40, **CACHES["paged"]).build(predicting)
    with cfg.build(predicting) as engine, pytest.raises(ConfigError, match=r"hidden states go to engine.speculation"):
        engine.check(Request((6, 7), SamplingOptions(max_tokens=1), pooling="last"))


def test_a_draft_model_with_the_random_numbers_of_the_request_is_accepted_more_often(model, expected, monkeypatch):
    asked = [
        Request(ids, SamplingOptions(seed=at, max_tokens=20, ignore_eos=True))
        for at, ids in enumerate(prompts([6] * 6))
    ]
    shares, propose = [], DraftModel.propose
    for is_coupled in (True, False):
        if not is_coupled:
            monkeypatch.setattr(
                DraftModel, "propose", lambda self, each, seeds: propose(self, each, dict.fromkeys(seeds, (1, 2)))
            )
        cfg = DraftModel.Config(num_speculative_tokens=2)
        _, stats = answers(model, asked, cfg, draft_model=noisy(model, 0.1))
        shares.append(stats.accepted_tokens / stats.draft_tokens)
    assert shares[0] > shares[1] + 0.2


@LONG
def test_a_draft_model_follows_rows_that_are_preempted_and_change_slots(model, expected):
    asked, pieces = expected
    cache, cfg = PagedCache.Config(page_size=4, num_pages=10), DraftModel.Config(num_speculative_tokens=4)
    greedy = [each for at, each in enumerate(asked) if at % 3 == 0]
    found, stats = answers(model, [*greedy, *greedy], cfg, draft_model=model, cache=cache)
    assert [each.ids for each in found] == [each.ids for at, each in enumerate(pieces) if at % 3 == 0] * 2
    assert stats.preempted > 0 and stats.accepted_tokens > 0.95 * stats.draft_tokens


@LONG
def test_a_draft_model_drafts_again_after_the_same_token(model, expected, monkeypatch):
    """As after a preemption whose last chunk of tokens that are computed again ends before the last token."""
    asked, pieces, propose = *expected, DraftModel.propose

    def twice(self, sequences, seeds):
        first, again = propose(self, sequences, seeds), propose(self, sequences, seeds)
        assert again == first
        return again

    monkeypatch.setattr(DraftModel, "propose", twice)
    found, stats = answers(model, asked, DraftModel.Config(num_speculative_tokens=3), draft_model=noisy(model, 0.03))
    assert_equal(found, pieces)
    assert 0 < stats.accepted_tokens < stats.draft_tokens


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
        ({"speculation": DraftModel.Config()}, "neither engine.speculation.model nor the argument draft_model"),
        ({"speculation": DraftModel.Config(model="no-recipe")}, "there is no recipe 'no-recipe'"),
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
    with pytest.raises(AxcoreError, match=message):
        cfg.build(model)


def test_wrong_draft_models_are_refused(model):
    cfg = Engine.Config(max_len=MAX_LEN, max_rows=3, step_tokens=20)
    with pytest.raises(ConfigError, match=r"draft_model has no effect with engine.speculation=None"):
        cfg.build(model, draft_model=model)
    with pytest.raises(ConfigError, match=r"both engine.speculation.model='some' and the argument draft_model"):
        cfg.set(speculation=DraftModel.Config(model="some")).build(model, draft_model=model)
    other = tiny_model().set(vocab_size=VOCAB_SIZE + 1).build(rngs=ax.Rngs(0))
    with pytest.raises(
        ConfigError, match=rf"the draft model has vocab_size={VOCAB_SIZE + 1}, but the model {VOCAB_SIZE}"
    ):
        cfg.set(speculation=DraftModel.Config()).build(model, draft_model=other)


class Unmanaged(Linear):
    """A layer with decoding state of its own."""

    class Config(Linear.Config):
        pass

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.kept = DecodingState(np.zeros(3, np.float32), axes=("batch",))


def test_state_that_cannot_be_rolled_back_is_refused(model):
    ring = RingCache.Config(window=8, spare=2)
    masked = ax.use("sliding-window", size=8)(tiny_model()).build(rngs=ax.Rngs(0))
    cfg = Engine.Config(max_len=MAX_LEN, max_rows=3, step_tokens=20, cache=ring)
    with pytest.raises(ConfigError, match=r"=3: model.*layers\.0\.attention\.cache can drop at most 2 tokens"):
        cfg.set(speculation=NGram.Config(num_speculative_tokens=3)).build(masked)
    unmanaged = ax.select(tiny_model(), "head").map(lambda _, __: Unmanaged.Config()).build(rngs=ax.Rngs(0))
    cfg = Engine.Config(max_len=MAX_LEN, max_rows=3, step_tokens=20)
    with pytest.raises(ConfigError, match=r"=4: model\.head keeps state .*Set speculation=None"):
        cfg.set(speculation=NGram.Config()).build(unmanaged)


MAMBA = ax.use("mamba2", state_dim=4, head_dim=4, chunk=4)
RECURRENT = {
    "short convolutions": lambda: ax.select(shrunk(ax.recipe("quickstart").model), "**.conv").set(init=ax.nn.FanIn()),
    "Mamba-2": lambda: ax.pipe(tiny_model(), MAMBA),
    "half Mamba-2": lambda: ax.pipe(tiny_model(), ax.use("mamba2", state_dim=4, head_dim=4, attention_every=2)),
}


@pytest.mark.parametrize(
    ("name", "cache", "drafter"),
    [
        pytest.param("short convolutions", "paged", "scripted", marks=LONG),
        *(
            pytest.param(*each, marks=SLOW)
            for each in [
                ("Mamba-2", "contiguous", "scripted"),
                ("short convolutions", "contiguous", "ngram"),
                ("short convolutions", "contiguous", "model"),
                ("Mamba-2", "contiguous", "model"),
                ("half Mamba-2", "paged", "scripted"),
            ]
        ),
    ],
)
def test_recurrent_models_give_the_same_tokens_with_drafts(name, cache, drafter):
    """Rejected drafts leave no trace in the state, and a draft model with such state follows the row."""
    cfg = ax.select(RECURRENT[name](), "embedding").set(init=ax.nn.Normal(stddev=1.0))
    model = noisy(cfg.build(rngs=ax.Rngs(0)), 0.2)
    asked = [Request(ids, OPTIONS[at % 3]) for at, ids in enumerate(prompts((1, 2, 5, 9, 20, 30)))]
    pieces, _ = answers(model, asked, **CACHES[cache])
    scripted = Scripted.Config(known=known_outputs(asked[1:], pieces[1:]), num_speculative_tokens=3, percent_right=60)
    speculation = {
        "scripted": scripted,
        "ngram": NGram.Config(prompt_lookup_min=1, num_speculative_tokens=2),
        "model": DraftModel.Config(num_speculative_tokens=2),
    }[drafter]
    draft_model = noisy(model, 0.03) if drafter == "model" else None
    found, stats = answers(model, asked, speculation, draft_model=draft_model, **CACHES[cache])
    assert_equal(found, pieces)
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@LONG
@pytest.mark.parametrize("spare", [3, 5])
def test_ring_caches_with_room_for_drafts_give_the_same_tokens(spare):
    masked = ax.pipe(tiny_model(), ax.use("rope"), ax.use("sliding-window", size=8)).build(rngs=ax.Rngs(0))
    asked = [Request(ids, OPTIONS[at % 3]) for at, ids in enumerate(prompts((1, 7, 8, 9, 20, 30)))]
    ring = {"cache": RingCache.Config(window=8, spare=spare)}
    pieces, _ = answers(masked, asked)
    drafter = Scripted.Config(known=known_outputs(asked, pieces), num_speculative_tokens=3, percent_right=60)
    found, stats = answers(masked, asked, drafter, **ring)
    assert_equal(found, pieces)
    assert 0 < stats.accepted_tokens < stats.draft_tokens


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


@LONG
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("max_len", [2, 12])
def test_more_drafts_than_fit_into_a_row(model, cache, max_len):
    room = [(ids, max_len - len(ids)) for ids in prompts([1, max_len - 1, max_len // 2])]
    asked = [Request(ids, SamplingOptions(temperature=0.0, max_tokens=most)) for ids, most in room]
    pieces, _ = answers(model, asked, max_len=max_len, **CACHES[cache])
    known = known_outputs(asked, pieces)
    drafter = Scripted.Config(known=known, num_speculative_tokens=40, percent_right=100)
    with Engine.Config(max_len=max_len, max_rows=3, speculation=drafter, **CACHES[cache]).build(model) as engine:
        engine.warm_up(("greedy",))
        compiled = engine.stats.compiled
        assert_equal(engine.generate(asked), pieces)
        assert engine.stats.compiled == compiled
