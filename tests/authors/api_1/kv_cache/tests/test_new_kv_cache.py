"""Decoding with axcore-new-kv-cache equals computing everything anew."""

import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.infer import Decoder
from axcore.nn import Attention
from axcore.testing import KVCacheSuite
from axcore_new_kv_cache.ring import RingCache


class TestRing(KVCacheSuite):
    name = "new-kv-cache"
    options = {"window": 4}
    window = 4


def test_a_mask_that_sees_further_is_refused():
    model = ax.select(TestRing().model(), Attention).set(mask=Attention.Config().mask)
    decoder, params, state = Decoder.of(
        model.build(rngs=ax.Rngs(0)), cache=RingCache.Config(window=4), batch_size=1, max_len=8
    )
    with pytest.raises(ax.ConfigError, match="window=4, but a query sees everything before it"):
        decoder(params, state, jnp.zeros((1, 2), jnp.int32), jnp.arange(2)[None])
