"""What a Decoder refuses, and what it makes of a model that has caches already."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axcore as ax
from axcore.infer import Decoder
from axcore.module import abstract
from axcore.nn import Attention, ContiguousCache, Linear
from axcore.testing import tiny_batch, tiny_model

IDS = tiny_batch()["inputs"]
PLACES = jnp.arange(IDS.shape[1], dtype=jnp.int32)[None]


def decoder_of(cfg, max_len=8):
    return Decoder.of(cfg.build(rngs=ax.Rngs(0)), cache=ContiguousCache.Config(), batch_size=2, max_len=max_len)


def test_a_model_that_has_caches_already_gets_them_in_the_right_size():
    filled = ax.select(tiny_model(), Attention).set(cache=ContiguousCache.Config(batch_size=1, max_len=3))
    decoder, params, state = decoder_of(filled)
    plain, _, empty = decoder_of(tiny_model())
    np.testing.assert_array_equal(decoder(params, state, IDS, PLACES)[0], plain(params, empty, IDS, PLACES)[0])


@pytest.mark.parametrize(
    ("ids", "index"),
    [(IDS[:, :0], PLACES[:, :0]), (IDS, PLACES[0]), (IDS[0], PLACES), (IDS, PLACES[:, :3])],
    ids=["no token", "index of one dimension", "ids of one dimension", "unequal lengths"],
)
def test_what_is_no_batch_of_rows_is_refused(ids, index):
    decoder, params, state = decoder_of(tiny_model())
    with pytest.raises(ax.ConfigError, match=r"must be \[batch, seq\] with at least one token"):
        decoder(params, state, ids, index)


@pytest.mark.parametrize("place", [-1, 8])
def test_a_place_outside_of_the_row_gives_nan_and_is_stored_nowhere(place):
    decoder, params, state = decoder_of(tiny_model())
    logits, after = decoder(params, state, IDS[:, :1], jnp.full((1, 1), place, jnp.int32))
    assert np.isnan(logits).all()
    cache = after["decoder"]["layers"]["attention"]["cache"]
    assert not cache["written"].any()
    assert not cache["keys"].any()


def test_what_nothing_decodes_is_refused():
    with pytest.raises(ax.ConfigError, match="not of Linear"):
        Decoder.of(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), cache=ContiguousCache.Config(), batch_size=1, max_len=2)
    layer = Linear.Config(input_dim=2, output_dim=2).build(rngs=ax.Rngs(0))
    with pytest.raises(ax.ConfigError, match="nothing in Linear keeps"):
        Decoder.of(layer, cache=ContiguousCache.Config(), batch_size=1, max_len=2)


def test_a_cache_without_sizes_says_that_decoding_sets_them():
    cfg = ax.pipe(tiny_model(), ax.use("contiguous"))
    with pytest.raises(
        ax.ConfigError, match=r"attention\.cache: batch_size and max_len of the KV cache: decoding sets"
    ):
        abstract(cfg)
