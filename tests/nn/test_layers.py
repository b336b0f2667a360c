"""Linear, RMSNorm, Embedding and FeedForward against the formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import Embedding, FanIn, FeedForward, Linear, Normal, Ones, RMSNorm, Zeros

from . import reference
from .support import call, parameters, wide

X = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
IDS = np.array([[0, 4, 2], [2, 2, 1]])


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4)], ids=str)
@pytest.mark.parametrize("use_bias", [False, True])
def test_linear_follows_its_formula(shape, use_bias):
    cfg = Linear.Config(input_dim=4, output_dim=5, use_bias=use_bias)
    params = parameters(cfg)
    assert set(params) == ({"weight", "bias"} if use_bias else {"weight"})
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    p = wide(params)
    expected = x.astype(np.float64) @ p["weight"] + (p["bias"] if use_bias else 0)
    output, _ = call(cfg, params, x)
    assert output.shape == (*shape[:-1], 5)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_linear_separates_compute_and_parameter_dtypes():
    cfg = Linear.Config(input_dim=4, output_dim=5, use_bias=True, dtypes=ax.DTypes(compute="bfloat16"))
    params = parameters(cfg)
    assert params["weight"].dtype == np.float32
    output, _ = call(cfg, params, X)
    assert output.dtype == jnp.bfloat16
    p = wide(params)
    np.testing.assert_allclose(output.astype(np.float64), X @ p["weight"] + p["bias"], rtol=3e-2, atol=3e-2)


def test_weight_and_bias_have_the_axes_of_the_linear():
    cfg = Linear.Config(input_dim=4, output_dim=5, use_bias=True, axes=("embed", "mlp"))
    assert abstract(cfg)[0].axes == {"weight": ("embed", "mlp"), "bias": ("mlp",)}


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_rms_norm_follows_the_formula(scale, eps):
    cfg = RMSNorm.Config(input_dim=4, eps=eps)
    params = parameters(cfg)
    x = (X * scale).astype(np.float32)
    expected = reference.rms_norm(x.astype(np.float64), wide(params)["scale"], eps)
    np.testing.assert_allclose(call(cfg, params, x)[0], expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_low_precision_input_is_computed_in_float32():
    cfg = RMSNorm.Config(input_dim=64, dtypes=ax.DTypes(param="bfloat16", compute="bfloat16"))
    params = parameters(cfg)
    x = (100 * np.random.default_rng(0).normal(size=(2, 64))).astype(jnp.bfloat16)
    output, _ = call(cfg, params, x)
    assert output.dtype == jnp.bfloat16
    expected = reference.rms_norm(x.astype(np.float64), wide(params)["scale"])
    np.testing.assert_allclose(output.astype(np.float64), expected, rtol=2**-8, atol=1e-6)  # rounded once, at the end


def test_rms_norm_of_zeros_is_zero():
    cfg = RMSNorm.Config(input_dim=4)
    np.testing.assert_array_equal(call(cfg, parameters(cfg), np.zeros((2, 4), np.float32))[0], np.zeros((2, 4)))


def test_embedding_looks_up_rows_and_attends_to_all_rows():
    cfg = Embedding.Config(vocab_size=5, output_dim=4)
    params = parameters(cfg)
    table = params["weight"]
    np.testing.assert_array_equal(call(cfg, params, IDS)[0], table[IDS])
    attended, _ = call(cfg, params, X, method="attend")
    assert attended.shape == (2, 3, 5)
    np.testing.assert_allclose(attended, X.astype(np.float64) @ wide(params)["weight"].T, rtol=1e-5, atol=1e-6)


def test_embeddings_have_the_compute_dtype():
    cfg = Embedding.Config(vocab_size=5, output_dim=4, dtypes=ax.DTypes(compute="bfloat16"))
    output, _ = call(cfg, parameters(cfg), IDS)
    assert output.dtype == jnp.bfloat16


def test_feed_forward_is_swiglu_by_default_and_supports_other_activations():
    cfg = FeedForward.Config(input_dim=4, hidden_dim=6)
    params = parameters(cfg)
    np.testing.assert_allclose(
        call(cfg, params, X)[0], reference.feed_forward(X.astype(np.float64), wide(params)), rtol=1e-5, atol=1e-6
    )
    p = wide(params)
    relu = np.maximum(X @ p["gate"]["weight"], 0) * (X @ p["up"]["weight"]) @ p["down"]["weight"]
    np.testing.assert_allclose(call(cfg.set(activation=jax.nn.relu), params, X)[0], relu, rtol=1e-5, atol=1e-6)


def test_feed_forward_names_its_axes():
    axes = abstract(FeedForward.Config(input_dim=4, hidden_dim=6))[0].axes
    assert axes["gate"]["weight"] == axes["up"]["weight"] == ("embed", "mlp")
    assert axes["down"]["weight"] == ("mlp", "embed")


@pytest.mark.parametrize(
    ("init", "stddev"),
    [(Normal(), 0.02), (Normal(stddev=3.0), 3.0), (FanIn(), 20**-0.5), (FanIn(scale=4.0), 2 * 20**-0.5)],
    ids=repr,
)
def test_normal_initializers_have_the_documented_standard_deviation(init, stddev):
    drawn = np.asarray(init(jax.random.key(0), (20, 400), jnp.float32), np.float64)
    np.testing.assert_allclose(drawn.std(), stddev, rtol=0.05)  # 8000 samples: the error is 0.8 %
    assert abs(drawn.mean()) < 4 * stddev / np.sqrt(drawn.size)


def test_fan_in_counts_all_dimensions_but_the_last():
    drawn = np.asarray(FanIn()(jax.random.key(0), (4, 5, 400), jnp.float32), np.float64)
    np.testing.assert_allclose(drawn.std(), 20**-0.5, rtol=0.05)


def test_constant_initializers_have_the_requested_dtype():
    for init, value in ((Zeros(), 0), (Ones(), 1)):
        made = init(jax.random.key(0), (2, 3), jnp.bfloat16)
        assert made.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(made, np.float32), np.full((2, 3), value))
