"""The short convolution passes its suite; its layer and errors."""

import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract, functional
from axcore.nn import Attention, FeedForward, Normal, TokenInfo
from axcore.testing import RecurrentSuite
from axcore_recipes.short_conv import ConvTransformerLayer, ShortConv

SEQ, DIM, WIDTH = 9, 6, 4
CONFIG = ShortConv.Config(input_dim=DIM, width=WIDTH, init=Normal(stddev=1.0))
X = np.random.default_rng(0).normal(size=(2, SEQ, DIM)).astype(np.float32)


class TestShortConv(RecurrentSuite):
    def config(self):
        return CONFIG

    def reference(self, params, x):
        lags = range(min(WIDTH, x.shape[1]))
        before = [np.pad(x, ((0, 0), (lag, 0), (0, 0)))[:, : x.shape[1]] for lag in lags]
        return x + sum(params["weight"][lag] * before[lag] for lag in lags)


def test_a_new_layer_is_the_identity():
    fn, params, state = functional(ShortConv.Config(input_dim=DIM).build(rngs=ax.Rngs(0)))
    np.testing.assert_array_equal(fn(params, state, X, TokenInfo.of(jnp.zeros((2, SEQ), jnp.int32)))[0][0], X)


def test_layer_has_a_convolution_attention_and_ffn():
    cfg = ConvTransformerLayer.Config(
        input_dim=DIM, attention=Attention.Config(num_heads=1), ffn=FeedForward.Config(hidden_dim=8)
    )
    assert {"conv", "attention", "ffn"} <= abstract(cfg)[1].keys()


def test_a_width_of_zero_raises():
    with pytest.raises(ax.ConfigError, match="width must be at least 1, not 0"):
        abstract(CONFIG.set(width=0))
