"""Static scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import functional
from axcore.nn import Linear
from axcore.numerics import calibrated, stored
from axcore_int8.int8 import Int8


class OneLinear(ax.Layer):
    """A linear map of rows that token ids select."""

    class Config(ax.Layer.Config):
        linear: Linear.Config = Linear.Config(input_dim=64, output_dim=5)

    def __init__(self, cfg, *, rngs):
        self.linear = self.child("linear", cfg.linear, rngs)

    def __call__(self, ids):
        return self.linear(rows()[ids])


def rows():
    return jax.random.normal(jax.random.key(3), (50, 64)).at[7, 0].set(40.0)


def model(**options):
    cfg = OneLinear.Config()
    return cfg.set(linear=cfg.linear.set(numerics=Int8.Config(activation_scales="static", **options)))


def measured(ids, **options):
    _, params, state = functional(model(**options).build(rngs=ax.Rngs(0)))
    found = calibrated(model(**options), params, state, [jnp.asarray(each)[None] for each in ids])
    return float(found["linear"]["numerics"]["input_amax"])


def test_the_percentile_is_measured():
    seen = np.abs(np.asarray(rows()))[[4, 5, 6, 7]]
    assert measured([[4, 5, 6, 7]]) == 40
    np.testing.assert_allclose(measured([[4, 5, 6, 7]], percentile=99.0), np.percentile(seen, 99.0), rtol=1e-6)
    halves = [np.percentile(seen[half], 99.0) for half in (slice(2), slice(2, 4))]
    np.testing.assert_allclose(measured([[4, 5], [6, 7]], percentile=99.0), max(halves), rtol=1e-6)


@pytest.mark.parametrize("weights", ["float", "stored"])
def test_products_use_the_measured_scale(weights):
    """Larger inputs than those that were measured are clipped."""
    cfg = model()
    _, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    state = calibrated(cfg, params, state, [jnp.asarray([[4, 5]])])
    weight = np.asarray(params["linear"]["weight"], np.float64)
    if weights == "stored":
        cfg, params = stored(cfg, params)
    fn = functional(cfg.build(rngs=ax.Rngs(0)))[0]
    found = fn(params, state, jnp.asarray([[4, 7]]))[0][0]
    x = np.asarray(rows(), np.float64)[[4, 7]]
    scale, scales = (
        np.abs(each).max(axis, keepdims=True) / 127 for each, axis in ((np.asarray(rows())[[4, 5]], None), (weight, 0))
    )
    codes = np.clip(np.rint(x / scale), -127, 127) * scale
    np.testing.assert_allclose(found[0], codes @ (np.rint(weight / scales) * scales), rtol=1e-4, atol=1e-4)


def test_static_scales_keep_infinities_and_nan_visible():
    cfg = Linear.Config(input_dim=16, output_dim=4, numerics=Int8.Config(activation_scales="static"))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    state = {**state, "numerics": {**state["numerics"], "input_amax": jnp.float32(2.0)}}
    x = jnp.ones((3, 16)).at[0, 3].set(jnp.nan).at[1, 3].set(jnp.inf)
    found = np.asarray(fn(params, state, x)[0][0])
    assert np.isnan(found[:2]).all() and np.isfinite(found[2]).all()
