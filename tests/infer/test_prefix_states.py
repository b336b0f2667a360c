"""Prompts of models with state in slots start from saved states of earlier prompts, and sample the same tokens."""

import numpy as np
import pytest

from axcore.config import ConfigError
from axcore.infer import Request, SamplingOptions
from axcore.infer.speculation.ngram import NGram

from .offload_models import CASES, prompts

STATES = 3
OPTIONS = SamplingOptions(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
SHARED = prompts((18,))[0]
ASKED = [Request((*SHARED, *own), OPTIONS) for own in prompts((5, 7, 9, 2), seed=1)]


def answers(engine, requests=ASKED):
    """The samples of the requests, one after another, and the number of tokens that each found in the cache."""
    pieces = [engine.generate([request])[0] for request in requests]
    found = [(piece.ids, [each.logprob for each in piece.logprobs]) for piece in pieces]
    return found, [piece.num_cached for piece in pieces]


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        pytest.param("mamba2-paged", 0, marks=pytest.mark.long),
        pytest.param("mamba2-paged", 2, marks=pytest.mark.long),
        pytest.param("ring-paged", 0, marks=pytest.mark.slow),
        pytest.param("ring-paged", 2, marks=pytest.mark.slow),
    ],
)
def test_a_hit_gives_the_tokens_of_a_miss(name, drafts):
    """The second prompt saves the state after the 16 tokens of the pages that it shares. Later ones start there."""
    case = CASES[name]
    fields = {"cache": case.large}
    if drafts:
        fields["speculation"] = NGram.Config(num_speculative_tokens=drafts)
    with (
        case.engine(case.model(), **fields) as plain,
        case.engine(case.model(), prefix_states=STATES, **fields) as engine,
    ):
        wanted, missed = answers(plain)
        found, cached = answers(engine)
        again, whole = answers(engine)
        assert missed == [0] * 4 and cached == [0, 0, 16, 16]
        assert whole[-1] == 16 and whole[-2] in (16, 24)  # their own states, while they are kept
        assert engine.stats.saved_states == STATES
        assert engine.stats.pages.live == 0
        for each in (found, again):
            assert [ids for ids, _ in each] == [ids for ids, _ in wanted]
            for (_, logprobs), (_, expected) in zip(each, wanted, strict=True):
                np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.slow
def test_an_engine_that_computes_prompts_for_another_starts_from_states():
    case = CASES["mamba2-paged"]
    fields = {"cache": case.large, "prefix_states": STATES}
    with case.engine(case.model(), cache=case.large) as plain, case.engine(case.model(), **fields) as prefill:
        cfg = prefill.config
        with cfg.build(case.model(), eos_ids=(5,), prefill=prefill) as engine:
            assert [ids for ids, _ in answers(engine)[0]] == [ids for ids, _ in answers(plain)[0]]
        assert prefill.stats.cached_tokens == 2 * 16


@pytest.mark.long
def test_samples_that_share_a_prompt_compute_it_once():
    case, request = CASES["mamba2-paged"], Request(SHARED, OPTIONS)
    with case.engine(case.model(), cache=case.large, prefix_states=1) as engine:
        first, *others = engine.generate([request], n=3)
        assert [each.ids for each in others] == [first.ids] * 2
        assert engine.stats.cached_tokens == 2 * 16


@pytest.mark.long
def test_nothing_compiles_after_the_warm_up():
    case = CASES["mamba2-paged"]
    with case.engine(case.model(), cache=case.large, prefix_states=STATES) as engine:
        engine.warm_up(methods=("greedy",))
        compiled = engine.stats.compiled
        assert answers(engine)[1] == [0, 0, 16, 16]
        assert engine.stats.compiled == compiled


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("mamba2", {}, r"engine.prefix_states=3 requires a cache with pages in some layer"),
        ("paged", {}, r"engine.prefix_states=3 has no use, since all decoding state of the model is in pages"),
        ("mamba2-paged", {"prefix_caching": False}, r"engine.prefix_states=3 has no use with .*prefix_caching=False"),
        ("mamba2-paged", {"prefix_states": 15}, r"engine.prefix_states=15 exceeds the 14 pages of the cache"),
        ("mamba2-paged", {"prefix_caching": True, "prefix_states": 0}, r"otherwise set prefix_states, or leave"),
    ],
)
def test_settings_without_use_raise(name, fields, message):
    case = CASES[name]
    with pytest.raises(ConfigError, match=message):
        case.engine(case.model(), **{"prefix_states": STATES} | fields)


@pytest.mark.parametrize(
    ("name", "fields", "warns"),
    [
        ("mamba2-paged", {}, True),
        ("mamba2-paged", {"prefix_states": STATES}, False),
        ("mamba2-paged", {"prefix_caching": False}, False),
        ("mamba2", {}, False),
        ("paged", {}, False),
    ],
)
def test_an_engine_says_that_prompts_share_nothing(name, fields, warns, caplog):
    case = CASES[name]
    case.engine(case.model(), **fields).close()
    messages = [each.getMessage() for each in caplog.records if each.name.startswith("axcore")]
    assert bool(messages) == warns
    assert not warns or ("layers" in messages[0] and "Set engine.prefix_states" in messages[0]), messages
