"""Decoding with shared keys and values: the same logits, and caches only where keys are computed."""

import functools

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import abstract, functional
from axcore.nn import Contiguous, ContiguousCache, KVCache, Sequence, for_decoding

from .reference import BATCH, LAYER, SEQ, batch, listed, loss_and_grads, model, parameters, repeated

MAX_LEN = SEQ + 2
IDS = batch()["inputs"]


@functools.cache
def decoding(cfg):
    """(decoder, parameters, state before the first token, logits of whole rows)."""
    built = cfg.build(rngs=ax.Rngs(0))
    fn, params, _ = functional(built)
    whole = jax.jit(lambda params: fn(params, {}, IDS)[0][0])(params)
    decoder, params, state = Decoder.of(built, cache=ContiguousCache.Config(), batch_size=BATCH, max_len=MAX_LEN)
    return jax.jit(decoder.__call__), params, state, whole


@pytest.mark.parametrize("pieces", [(2, 3, 1), (1,) * SEQ], ids=str)
@pytest.mark.parametrize(
    "cfg",
    [pytest.param(repeated(4, 2), id="repeated"), pytest.param(listed(3, 3), id="listed", marks=pytest.mark.long)],
)
def test_prefill_in_pieces_matches_the_full_pass(cfg, pieces):
    step, params, state, whole = decoding(cfg)
    found, start = [], 0
    for size in pieces:
        tokens = Step(IDS[:, start : start + size], np.full((BATCH,), start, np.int32))
        logits, state = step(params, state, tokens)
        found.append(logits)
        start += size
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, rtol=1e-4, atol=1e-5)


def prepared(cfg):
    return for_decoding(cfg, batch_size=BATCH, max_len=MAX_LEN, cache=ContiguousCache.Config())


def kept(cfg):
    """The number of elements of decoding state, by path."""
    leaves = jax.tree.leaves_with_path(abstract(prepared(cfg))[2])
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.size for path, leaf in leaves}


@pytest.mark.parametrize("every", [2, 4])
def test_caches_shrink_by_the_group_size(every):
    shared, alone = kept(repeated(8, every)), kept(repeated(8))
    assert every * sum(shared.values()) == sum(alone.values())
    assert {path.rpartition(".")[0] for path in shared} == {"decoder.layers.layers.0.attention.cache.cache"}


def test_case_use_of_a_cache_reaches_only_layers_with_keys():
    """Before or after grouping: layers that borrow keys have no cache of their own."""
    cross, cache = ax.use("cross-layer-kv", every=3), ax.use("contiguous")
    cfg = ax.pipe(listed(3), cross, cache)
    assert cfg == ax.pipe(listed(3), cache, cross)
    assert [path for path, _ in ax.select(cfg, ContiguousCache)] == ["decoder.layers.0.attention.cache.cache"]
    assert prepared(cfg) == prepared(listed(3, 3))
    loss, _ = loss_and_grads(cfg, parameters(cfg), batch())
    np.testing.assert_array_equal(loss, loss_and_grads(listed(3, 3), parameters(cfg), batch())[0])


class Halved(KVCache):
    """A cache that returns different keys than it receives, like a quantized cache."""

    def __call__(self, inputs):
        kv = inputs.plain
        return inputs.replace(kv=Contiguous(kv.k / 2, kv.v, kv.tokens))


def with_cache(cache):
    layer = ax.select(LAYER, "attention").set(cache=cache)
    return ax.use("cross-layer-kv")(model(Sequence.Config(layers=[layer] * 2)))


def test_shared_keys_are_those_that_the_cache_returns():
    params, plain = parameters(listed(2, 2)), listed(2, 2)
    found, _ = loss_and_grads(with_cache(Halved.Config()), params, batch())
    first = params["decoder"]["layers"][0]["attention"]
    first["key"]["weight"] = first["key"]["weight"] / 2
    np.testing.assert_allclose(found, loss_and_grads(plain, params, batch())[0], rtol=1e-6)


def test_existing_cache_is_kept_for_decoding():
    assert kept(with_cache(Halved.Config())) == {}


class Reading(KVCache):
    """A cache that computes attention itself."""

    def __call__(self, inputs):
        return inputs.q


def test_cache_that_computes_attention_is_rejected_by_path():
    cfg = with_cache(Reading.Config())
    with pytest.raises(ax.ConfigError, match=r"^decoder\.layers\.0\.attention\.cache: Reading computes attention"):
        loss_and_grads(cfg, parameters(cfg), batch())
