"""Decoding with axcore-new-kv-cache equals full recomputation."""

import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.nn import Attention
from axcore.testing import KVCacheSuite
from axcore_new_kv_cache.ring import RingCache


class TestRing(KVCacheSuite):
    name = "new-kv-cache"
    options = {"window": 4}
    window = 4


def test_a_mask_beyond_the_window_raises():
    model = ax.select(TestRing().model(), Attention).set(mask=Attention.Config().mask)
    decoder, params, state = Decoder.of(
        model.build(rngs=ax.Rngs(0)), cache=RingCache.Config(window=4), batch_size=1, max_len=8
    )
    with pytest.raises(ax.ConfigError, match="window=4, but a query sees everything before it"):
        decoder(params, state, Step(jnp.zeros((1, 2), jnp.int32), start=jnp.zeros(1, jnp.int32)))


def test_rolling_back_more_tokens_than_spare_gives_nan():
    model = TestRing().model().build(rngs=ax.Rngs(0))
    decoder, params, state = Decoder.of(model, cache=RingCache.Config(window=4, spare=1), batch_size=1, max_len=12)
    ids = jnp.arange(8)[None]
    _, state = decoder(params, state, Step(ids, start=jnp.zeros(1, jnp.int32)))
    one_back, _ = decoder(params, state, Step(ids[:, 7:], start=jnp.asarray([7])))
    three_back, _ = decoder(params, state, Step(ids[:, 5:6], start=jnp.asarray([5])))
    again, _ = decoder(params, state, Step(ids, start=jnp.zeros(1, jnp.int32)))
    assert jnp.isfinite(one_back).all()
    assert jnp.isnan(three_back).all()
    assert jnp.isfinite(again).all()
