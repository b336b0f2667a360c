"""Weights of a run with FP8 in models with other options, and averages of stored weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.train import FromRun, save_model
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat
from axcore_callbacks.ema import EMA

from .support import model

WEIGHT = "decoder.layers.1.ffn.up.weight"
HISTORY = "decoder.layers.1.ffn.up.numerics.input"


@pytest.mark.parametrize("length", [3, 5])
def test_histories_of_another_length_start_anew(tmp_path, length):
    cfg = model(3, scaling="delayed", amax_history_len=3)
    _, params, state = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    folder = save_model(tmp_path / "run", cfg, params, jax.tree.map(jnp.ones_like, state))
    other = model(3, scaling="delayed", amax_history_len=length)
    _, shapes, forms = abstract(other)
    found = initial_arrays(FromRun.Config(folder=str(folder)), other, flat(shapes), flat(forms), 1)
    np.testing.assert_array_equal(found[WEIGHT], flat(params)[WEIGHT])
    np.testing.assert_array_equal(found[HISTORY], np.full(length, length == 3))


def test_averages_copy_codes():
    params = {"codes": jnp.ones(3, jnp.float8_e4m3fn), "scales": jnp.ones(3)}
    average = EMA(EMA.Config())
    state = average.device_init(params)
    moved = average.device_update(state, {"codes": 2 * params["codes"], "scales": 2 * params["scales"]}, jnp.int32(1))
    assert moved["params"]["codes"].dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(moved["params"]["codes"].astype(jnp.float32), np.full(3, 2.0))
    assert (moved["params"]["scales"] > 1).all() and (moved["params"]["scales"] < 2).all()
