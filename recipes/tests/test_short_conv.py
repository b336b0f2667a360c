"""The short convolution: comparison with NumPy float64, documents, decoding and errors."""

import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract, functional
from axcore.nn import Attention, CachedRows, ContiguousCache, FeedForward, Normal, TokenInfo, for_decoding
from axcore_recipes.short_conv import ConvTransformerLayer, ShortConv

SEQ, DIM, WIDTH = 9, 6, 4
CONFIG = ShortConv.Config(input_dim=DIM, width=WIDTH, init=Normal(stddev=1.0))
POSITIONS = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 0, 1]])
X = np.random.default_rng(0).normal(size=(2, SEQ, DIM)).astype(np.float32)


def built(cfg=CONFIG):
    return functional(cfg.build(rngs=ax.Rngs(0)))


def formula(x, positions, weight):
    y = np.array(x, np.float64)
    for row, t in np.ndindex(x.shape[:2]):
        for lag in range(min(len(weight), positions[row, t] + 1)):
            y[row, t] += np.float64(weight[lag]) * x[row, t - lag]
    return y


@pytest.mark.parametrize("positions", [POSITIONS, np.tile(np.arange(SEQ), (2, 1))], ids=["packed", "one document"])
def test_output_equals_the_formula(positions):
    fn, params, state = built()
    y = fn(params, state, X, TokenInfo(np.arange(SEQ)[None], positions))[0][0]
    np.testing.assert_allclose(y, formula(X, positions, params["weight"]), rtol=1e-5, atol=1e-5)


def test_a_new_layer_is_the_identity():
    fn, params, state = built(ShortConv.Config(input_dim=DIM))
    np.testing.assert_array_equal(fn(params, state, X, TokenInfo.of(jnp.zeros((2, SEQ), jnp.int32)))[0][0], X)


@pytest.mark.parametrize("cuts", [[5], [1, 2, 6], range(1, SEQ)], ids=["2 pieces", "4 pieces", "tokens"])
def test_decoding_in_pieces_equals_one_call(cuts):
    cfg = for_decoding(CONFIG, batch_size=2, max_len=SEQ, cache=ContiguousCache.Config())
    fn, params, state = built(cfg)
    found = []
    for start, stop in zip([0, *cuts], [*cuts, SEQ], strict=True):
        piece, state = decoded(fn, params, state, X[:, start:stop], start)
        found.append(piece)
    wanted = formula(X, np.tile(np.arange(SEQ), (2, 1)), params["weight"])
    np.testing.assert_allclose(np.concatenate(found, axis=1), wanted, rtol=1e-5, atol=1e-5)


def test_padding_at_the_end_of_a_prompt_is_not_stored():
    cfg = for_decoding(CONFIG, batch_size=2, max_len=SEQ, cache=ContiguousCache.Config())
    fn, params, state = built(cfg)
    padded = np.concatenate([X[:, :5], np.full((2, 3, DIM), 100, np.float32)], axis=1)
    _, state = decoded(fn, params, state, padded, 0, valid=np.arange(8)[None] < 5)
    found, _ = decoded(fn, params, state, X[:, 5:], 5)
    wanted = formula(X, np.tile(np.arange(SEQ), (2, 1)), params["weight"])[:, 5:]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def decoded(fn, params, state, x, start, valid=None):
    """(output, new state) of a call that continues rows of `start` tokens."""
    index = np.arange(start, start + x.shape[1])[None]
    everything = TokenInfo(np.arange(SEQ)[None], np.arange(SEQ)[None])
    cached = CachedRows(everything, jnp.full((2,), start + x.shape[1]))
    (y, _), new = fn(params, state, x, TokenInfo(index, index, None, valid, cached))
    return y, {**state, **new}


def test_layer_has_a_convolution_attention_and_ffn():
    cfg = ConvTransformerLayer.Config(
        input_dim=DIM, attention=Attention.Config(num_heads=1), ffn=FeedForward.Config(hidden_dim=8)
    )
    assert {"conv", "attention", "ffn"} <= abstract(cfg)[1].keys()


def test_a_width_of_zero_raises():
    with pytest.raises(ax.ConfigError, match="width must be at least 1, not 0"):
        abstract(CONFIG.set(width=0))
