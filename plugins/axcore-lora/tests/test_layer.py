"""LoRA and DoRA on one linear layer, against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import Linear
from axcore_lora import DoRA, LoRA
from axcore_lora.layer import magnitude_scale

INPUT, OUTPUT, RANK, ALPHA = 7, 5, 3, 4.5
S = ALPHA / RANK
KINDS = pytest.mark.parametrize("kind", [LoRA, DoRA])


def config(kind, use_bias=True, **options):
    adapter = kind.Config(rank=RANK, alpha=ALPHA, **options)
    return Linear.Config(input_dim=INPUT, output_dim=OUTPUT, use_bias=use_bias, adapter=adapter)


def random(cfg, seed=0):
    """The layer, with normal random numbers for all parameters."""
    fn, shapes, state = abstract(cfg)
    rng = np.random.default_rng(seed)
    return fn, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes), state


def inputs(seed=1):
    return np.random.default_rng(seed).normal(size=(2, 4, INPUT)).astype(np.float32)


def float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def columns(weight):
    return np.sqrt((weight * weight).sum(axis=0))


def whole_weight(params):
    """(the effective weight of the layer, W + sAB, DoRA's factors of the columns)."""
    p, adapter = params, params["adapter"]
    moved = p["weight"] + S * adapter["a"] @ adapter["b"]
    rescale = np.ones(OUTPUT)
    if "magnitude" in adapter:
        rescale = columns(p["weight"]) * (1 + adapter["magnitude"]) / columns(moved)
    return moved * rescale, moved, rescale


@KINDS
def test_output_matches_the_formula(kind):
    fn, params, state = random(config(kind))
    found = jax.jit(lambda params, x: fn(params, state, x)[0][0])(params, inputs())
    p = float64(params)
    expected = inputs().astype(np.float64) @ whole_weight(p)[0] + p["bias"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected - inputs() @ p["weight"] - p["bias"]).max() > 1  # the adapter matters


@KINDS
def test_gradients_match_the_formula_with_constant_norms(kind):
    fn, params, state = random(config(kind))
    x, g = inputs(), np.random.default_rng(2).normal(size=(2, 4, OUTPUT)).astype(np.float32)
    grads, dx = jax.jit(jax.grad(lambda params, x: (fn(params, state, x)[0][0] * g).sum(), (0, 1)))(params, x)

    p, x, g = float64(params), x.reshape(-1, INPUT).astype(np.float64), g.reshape(-1, OUTPUT).astype(np.float64)
    a, b = p["adapter"]["a"], p["adapter"]["b"]
    whole, moved, rescale = whole_weight(p)
    scaled = g * rescale  # the gradient of x (W + sAB)
    expected = {
        "weight": x.T @ scaled,
        "bias": g.sum(axis=0),
        "adapter": {"a": S * x.T @ scaled @ b.T, "b": S * (x @ a).T @ scaled},
    }
    if kind is DoRA:
        expected["adapter"]["magnitude"] = (g * (x @ moved)).sum(axis=0) * columns(p["weight"]) / columns(moved)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4), grads, expected)
    np.testing.assert_allclose(dx.reshape(-1, INPUT), g @ whole.T, rtol=1e-4, atol=1e-4)


@KINDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_adapter_is_bit_identical(kind, dtype):
    cfg = config(kind, dtypes=ax.DTypes(compute=dtype)).set(dtypes=ax.DTypes(compute=dtype))
    layer, plain = (each.build(rngs=ax.Rngs(0)) for each in (cfg, cfg.set(adapter=None)))
    assert np.any(layer.adapter.a[...]) and not np.any(layer.adapter.b[...])
    assert np.array_equal(layer.weight[...], plain.weight[...])
    for run in (lambda layer, x: layer(x), lambda layer, x: jax.jit(layer)(x)):
        assert run(layer, inputs()).dtype == dtype
        assert np.array_equal(run(layer, inputs()), run(plain, inputs()))
    # The same holds for weights that are loaded later, as from a checkpoint.
    other = np.random.default_rng(5).normal(size=(INPUT, OUTPUT)).astype(np.float32)
    layer.weight[...] = plain.weight[...] = jnp.asarray(other)
    assert np.array_equal(layer(inputs()), plain(inputs()))


def test_a_has_variance_one_over_input_dim():
    adapter = LoRA.Config(input_dim=400, output_dim=50, rank=50).build(rngs=ax.Rngs(0))
    np.testing.assert_allclose(np.std(adapter.a[...]), 400**-0.5, rtol=0.03)


@KINDS
def test_dropout_affects_only_the_adapter_input_in_training(kind):
    fn, params, state = random(config(kind, use_bias=False, dropout=0.25))
    params["adapter"]["a"][:] = 0
    params["adapter"]["a"][0] = 1  # the adapter sees feature 0
    x = np.ones((4000, INPUT), np.float32)

    def run(**options):
        return np.asarray(jax.jit(lambda: fn(params, state, x, **options)[0][0])())

    quiet, key = run(), jax.random.key(0)
    found = run(training=True, key=key)
    assert np.array_equal(run(key=key), quiet)
    assert np.array_equal(run(training=True, key=key), found)
    # Each row either drops feature 0 or multiplies it by 4 / 3.
    lost = x[0] @ params["weight"]
    if kind is DoRA:
        lost = lost * whole_weight(params)[2]
    dropped, kept = lost, lost + (quiet[0] - lost) / 0.75
    is_dropped = np.isclose(found, dropped, rtol=1e-4, atol=1e-4).all(axis=1)
    is_kept = np.isclose(found, kept, rtol=1e-4, atol=1e-4).all(axis=1)
    assert (is_dropped ^ is_kept).all()
    np.testing.assert_allclose(is_dropped.mean(), 0.25, atol=0.03)


def test_sums_use_the_accumulate_dtype():
    """bfloat16 activations, float32 sums: the adapter's part is not rounded to bfloat16 before it is added."""
    types = ax.DTypes(compute=jnp.bfloat16, accumulate=jnp.float32, output=jnp.float32)
    cfg = config(LoRA, use_bias=False).set(dtypes=types)
    fn, params, state = random(cfg)
    found = fn(params, state, inputs())[0][0]
    assert found.dtype == jnp.float32
    w, a, b, x = (
        np.asarray(jnp.asarray(each, jnp.bfloat16), np.float64)
        for each in (params["weight"], params["adapter"]["a"], params["adapter"]["b"], inputs())
    )
    narrow = np.asarray(jnp.asarray(x @ a, jnp.bfloat16), np.float64)
    np.testing.assert_allclose(found, x @ w + S * narrow @ b, rtol=1e-5, atol=1e-2)
    rounded = np.asarray(jnp.asarray(x @ w + S * narrow @ b, jnp.bfloat16), np.float64)
    assert np.abs(found - (x @ w + S * narrow @ b)).mean() < 0.3 * np.abs(rounded - (x @ w + S * narrow @ b)).mean()


def scales(weight, a, b, magnitude):
    return np.asarray(jax.jit(magnitude_scale, static_argnums=4)(weight, a, b, magnitude, S))


def test_zero_column_is_adapted_like_lora():
    _, params, _ = random(config(DoRA))
    adapter = params["adapter"]
    weight = params["weight"].copy()
    weight[:, 1] = 0
    found = scales(weight, *(adapter[name] for name in ("a", "b", "magnitude")))
    expected = whole_weight(float64(params))[2]
    expected[1] = 1 + adapter["magnitude"][1]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    fresh = np.zeros_like(adapter["b"]), np.zeros_like(adapter["magnitude"])
    assert np.array_equal(scales(weight, adapter["a"], *fresh), np.ones(OUTPUT))


def test_cancelled_column_stays_finite():
    weight = np.random.default_rng(0).normal(size=(INPUT, 1)).astype(np.float32)
    found = scales(weight, weight, np.full((1, 1), -1 / S, np.float32), np.zeros(1, np.float32))
    assert 0 < found[0] <= 3000


def test_magnitude_scale_of_stacked_weights():
    rng = np.random.default_rng(0)
    shapes = (3, 2, INPUT, OUTPUT), (3, 2, INPUT, RANK), (3, 2, RANK, OUTPUT), (3, 2, OUTPUT)
    stacked = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    found = scales(*stacked)
    for index in np.ndindex(3, 2):
        np.testing.assert_allclose(found[index], scales(*(each[index] for each in stacked)), rtol=1e-5)


def test_logical_axes_follow_the_weight():
    cfg = Linear.Config(input_dim=INPUT, output_dim=OUTPUT, axes=("embed", "mlp"), adapter=DoRA.Config(rank=RANK))
    axes = abstract(cfg)[0].axes["adapter"]
    assert axes == {"a": ("embed", None), "b": (None, "mlp"), "magnitude": ("mlp",)}
