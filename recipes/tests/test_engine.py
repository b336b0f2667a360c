"""Every recipe, in small sizes: an engine with pages gives the log-probabilities of the training loss."""

import functools

import pytest

import axcore as ax
from axcore.config import content_hash
from axcore.infer import Engine
from axcore.plugin import Recipe, recipe, registry
from axcore.testing import shrunk
from axcore.testing.engine import check_logprobs
from axcore_paged_kv.cache import PagedCache

IN_CI = ("deepseek-v3", "gpt-oss-20b", "quickstart")
ENGINE = Engine.Config(max_len=32, max_rows=2, step_tokens=16, cache=PagedCache.Config(page_size=4, num_pages=20))


@functools.cache
def models():
    """Name -> small model, without those that equal an earlier one."""
    found = {}
    for name in (*IN_CI, *(offer.name for _, offer in registry().offers(Recipe))):
        small = shrunk(recipe(name).model)
        found.setdefault(content_hash(small), (name, small))
    return dict(found.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in IN_CI else pytest.mark.slow) for name in models()]
)
def test_an_engine_gives_the_log_probabilities_of_training(name):
    check_logprobs(models()[name].build(rngs=ax.Rngs(0)), ENGINE)
