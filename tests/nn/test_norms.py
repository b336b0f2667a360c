"""Norms, and other layers that act on each vector separately, against the formulas in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract, functional
from axcore.nn import FullWidthNorm, LayerNorm, Normal, PerHeadNorm, RMSNorm, Scale

from . import reference
from .support import call, parameters, wide

X = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
HEADS = np.random.default_rng(2).normal(size=(2, 3, 2, 4)).astype(np.float32)


def of_model(*configs):
    """Each config with the initial values of its parameters."""
    return [functional(cfg.build(rngs=ax.Rngs(0)))[1] for cfg in configs]


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_case_a_zero_centred_norm_adds_one_to_its_scale(cls, eps):
    cfg = cls.Config(input_dim=4, zero_centred=True, eps=eps)
    params = parameters(cfg)
    formula = reference.rms_norm if cls is RMSNorm else reference.layer_norm
    p = wide(params)
    expected = formula(X.astype(np.float64), 1 + p.pop("scale"), *p.values(), eps=eps)
    np.testing.assert_allclose(call(cfg, params, X)[0], expected, rtol=1e-5, atol=1e-6)


def test_every_norm_starts_with_a_scale_of_one():
    plain, centred, given, layer, layer_centred = of_model(
        RMSNorm.Config(input_dim=4),
        RMSNorm.Config(input_dim=4, zero_centred=True),
        RMSNorm.Config(input_dim=4, zero_centred=True, init=Normal(stddev=1.0)),
        LayerNorm.Config(input_dim=4),
        LayerNorm.Config(input_dim=4, zero_centred=True),
    )
    np.testing.assert_array_equal(plain["scale"], np.ones(4))
    np.testing.assert_array_equal(centred["scale"], np.zeros(4))
    assert np.abs(given["scale"]).min() > 0
    np.testing.assert_array_equal(layer["scale"], np.ones(4))
    np.testing.assert_array_equal(layer["bias"], np.zeros(4))
    np.testing.assert_array_equal(layer_centred["scale"], np.zeros(4))


def test_a_norm_without_a_scale_has_no_parameter():
    cfg = RMSNorm.Config(input_dim=4, use_scale=False)
    assert abstract(cfg)[1] == {}
    np.testing.assert_allclose(
        call(cfg, {}, X)[0], reference.rms_norm(X.astype(np.float64), np.ones(4)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["centred", "far from zero"])
def test_layer_norm_follows_the_formula(use_bias, offset):
    cfg = LayerNorm.Config(input_dim=4, use_bias=use_bias, eps=1e-3)
    params = parameters(cfg)
    assert set(params) == ({"scale", "bias"} if use_bias else {"scale"})
    x = (X + np.float32(offset)).astype(np.float32)
    p = wide(params)
    expected = reference.layer_norm(x.astype(np.float64), p["scale"], p.get("bias", 0.0), 1e-3)
    atol = 1e-6 + 4 * np.spacing(np.float32(offset))  # the mean is rounded to float32 before it is subtracted
    np.testing.assert_allclose(call(cfg, params, x)[0], expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
def test_norms_of_low_precision_input_are_computed_in_float32(cls):
    cfg = cls.Config(input_dim=64, dtypes=ax.DTypes(param="bfloat16", compute="bfloat16"))
    params = parameters(cfg)
    x = (100 + 10 * np.random.default_rng(0).normal(size=(2, 64))).astype(jnp.bfloat16)
    output, _ = call(cfg, params, x)
    assert output.dtype == jnp.bfloat16
    formula = reference.rms_norm if cls is RMSNorm else reference.layer_norm
    expected = formula(x.astype(np.float64), *(wide(params)[name] for name in sorted(params, reverse=True)))
    np.testing.assert_allclose(output.astype(np.float64), expected, rtol=2**-8, atol=1e-2)


def test_scale_multiplies_each_feature_and_keeps_the_dtype():
    cfg = Scale.Config(input_dim=4)
    params = parameters(cfg)
    np.testing.assert_allclose(call(cfg, params, HEADS)[0], HEADS * wide(params)["scale"], rtol=1e-6)
    assert call(cfg, params, HEADS.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_full_width_norm_normalizes_all_heads_of_a_token_as_one_vector(norm):
    cfg = FullWidthNorm.Config(num_heads=2, head_dim=4, norm=norm.Config(eps=1e-3))
    params = parameters(cfg)
    assert {leaf.shape for leaf in params["norm"].values()} == {(8,)}
    assert set(abstract(cfg)[0].axes["norm"].values()) == {("head",)}
    p, flat = wide(params)["norm"], HEADS.reshape(2, 3, 8).astype(np.float64)
    formula = reference.rms_norm if norm is RMSNorm else reference.layer_norm
    expected = formula(flat, *(p[name] for name in sorted(p, reverse=True)), eps=1e-3)
    np.testing.assert_allclose(call(cfg, params, HEADS)[0].reshape(2, 3, 8), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_case_per_head_norms_have_a_scale_for_each_head(norm):
    cfg = PerHeadNorm.Config(num_heads=2, head_dim=4, head_axis="kv_head", norm=norm.Config(eps=1e-3))
    params = parameters(cfg)
    assert set(abstract(cfg)[0].axes["norm"].values()) == {("kv_head",)}
    p = {name: value.reshape(2, 4) for name, value in wide(params)["norm"].items()}
    formula = reference.rms_norm if norm is RMSNorm else reference.layer_norm
    expected = formula(HEADS.astype(np.float64), *(p[name] for name in sorted(p, reverse=True)), eps=1e-3)
    np.testing.assert_allclose(call(cfg, params, HEADS)[0], expected, rtol=1e-5, atol=1e-5)


def test_per_head_requires_a_norm_with_groups():
    with pytest.raises(ax.ConfigError, match="groups"):
        abstract(PerHeadNorm.Config(num_heads=2, head_dim=4, norm=Scale.Config()))
    with pytest.raises(ax.ConfigError, match="input_dim=4 is not a multiple of groups=3"):
        abstract(RMSNorm.Config(input_dim=4, groups=3))


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm, Scale])
def test_an_invalid_width_raises(cls):
    with pytest.raises(ax.ConfigError, match="input_dim must be at least 1, not 0"):
        abstract(cls.Config(input_dim=0))
