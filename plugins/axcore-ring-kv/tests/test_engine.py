"""An engine with rings in the layers that have a window gives the tokens of full recomputation, with slots used by
several requests in turn, and with pages so few that requests are preempted."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Engine, Request, SamplingOptions
from axcore.module import functional
from axcore.nn import ContiguousCache, without_caches
from axcore.testing.models import VOCAB_SIZE, tiny_model
from axcore_paged_kv.cache import PagedCache

MAX_LEN = 32
LENGTHS = (1, 5, 20, 3, 17, 4, 9)
CACHES = {"contiguous": ContiguousCache.Config(), "paged": PagedCache.Config(page_size=4, num_pages=9)}


@pytest.mark.long
@pytest.mark.parametrize("cache", CACHES)
def test_an_engine_with_rings_gives_the_tokens_of_full_recomputation(cache):
    cfg = ax.pipe(
        ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0)),
        ax.use("sliding-window", size=4, global_every=2),
        ax.use("ring-kv", spare=2),
    )
    fn, params, state = functional(without_caches(cfg).build(rngs=ax.Rngs(0)))
    logits = jax.jit(lambda row, at: fn(params, state, row[None])[0][0][0, at])

    def recomputed(ids, count):
        row, tokens = np.zeros(MAX_LEN, np.int32), list(ids)
        for _ in range(count):
            row[: len(tokens)] = tokens
            tokens.append(int(np.argmax(logits(row, len(tokens) - 1))))
        return tuple(tokens[len(ids) :])

    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(6, VOCAB_SIZE, length).tolist()) for length in LENGTHS]
    greedy = SamplingOptions(temperature=0.0, max_tokens=9)
    engine = Engine.Config(max_len=MAX_LEN, max_rows=2, step_tokens=16, cache=CACHES[cache])
    with engine.build(cfg.build(rngs=ax.Rngs(0))) as running:
        found = running.generate([Request(ids, greedy) for ids in prompts])
        assert (running.stats.preempted > 0) == (cache == "paged")
    assert [each.ids for each in found] == [recomputed(ids, 9) for ids in prompts]
