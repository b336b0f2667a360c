"""Every family, with recorded weights: an engine with pages gives the log-probabilities of the training loss."""

import pytest

from axcore.infer import Engine
from axcore.testing.engine import check_logprobs
from axcore_paged_kv.cache import PagedCache

from .parity.test_parity import FAMILIES, loaded

IN_CI = ("cohere2", "gemma3")
ENGINE = Engine.Config(max_len=32, max_rows=2, step_tokens=16, cache=PagedCache.Config(page_size=4, num_pages=20))


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=pytest.mark.long if each in IN_CI else pytest.mark.slow) for each in FAMILIES]
)
def test_an_engine_gives_the_log_probabilities_of_training(family):
    _, fn, params, state = loaded(family)
    cfg, lengths = ENGINE, (21, 8)
    if family == "phi3":  # no row may pass 16 tokens, and a longer one is computed in one step
        cfg, lengths = cfg.set(max_rows=1, step_tokens=32), (21, 6)
    check_logprobs(fn.bind(params, state), cfg, lengths=lengths)
