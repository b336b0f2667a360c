"""The three products against NumPy, which computes codes and sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Batched, Blocks, Grouped, Linear, Plain, RaggedDot, Transposed
from axcore_int8.int8 import Int8
from axcore_int8.product import Options, int8_product
from axcore_int8.rounding import MAX_TERMS, quantized, rounded

IN, OUT, ROWS = 12, 7, 16
SIZES = (8, 0, 8)
KINDS = ("linear", "tied_head", "ragged", "blocks", "batched")


def case(kind):
    """(product, shape of the weight, its input axis, shape of x)."""
    if kind == "batched":
        return Batched(), (3, IN, OUT), -2, (3, ROWS, IN)
    if kind == "linear":
        return Plain(), (IN, OUT), -2, (2, ROWS // 2, IN)
    if kind == "tied_head":
        return Transposed(), (OUT, IN), -1, (2, ROWS // 2, IN)
    block = 4 if kind == "blocks" else 1
    group = jnp.repeat(jnp.arange(3), jnp.asarray(SIZES) // block, total_repeat_length=ROWS // block)
    matmul = Blocks(size=block) if kind == "blocks" else RaggedDot()
    return Grouped(jnp.asarray(SIZES, jnp.int32), group, ROWS, matmul), (3, IN, OUT), -2, (ROWS, IN)


def codes_of(x, axis):
    scale = np.abs(x).max(axis, keepdims=True) / 127
    return np.rint(x / np.where(scale == 0, 1, scale)), scale


def by_group(kind, x):
    """One array of rows for each matrix."""
    if kind == "batched":
        return list(x)
    if kind in ("ragged", "blocks"):
        return np.split(x, np.cumsum(SIZES)[:-1])
    return [x.reshape(-1, x.shape[-1])]


def expected(kind, x, weight, y_bar, input_axis):
    """(y, gradient of x, gradient of the weight in int8, gradient of the weight in floats)."""
    matrices = [weight.T] if input_axis == -1 else list(weight) if weight.ndim == 3 else [weight]
    found = []
    for rows, matrix, cotangent in zip(by_group(kind, x), matrices, by_group(kind, y_bar), strict=True):
        (w, w_scale), (codes, scale) = codes_of(matrix, 0), codes_of(rows, 1)
        g, g_scale = codes_of(cotangent * w_scale, 1)
        h, h_scale = codes_of(cotangent * scale, 0) if len(rows) else (cotangent, np.zeros((1, OUT)))
        ours = codes @ w * scale * w_scale, g @ w.T * g_scale, codes.T @ h * h_scale, rows.T @ cotangent
        found.append(ours)
    y, x_bar, int8, floats = zip(*found, strict=True)
    if kind == "batched":
        return tuple(map(np.stack, (y, x_bar, int8, floats)))
    weights = [
        each[0].T if input_axis == -1 else each[0] if kind == "linear" else np.stack(each) for each in (int8, floats)
    ]
    return np.concatenate(y), np.concatenate(x_bar), *weights


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("linear", "batched") else pytest.mark.long) for kind in KINDS]
)
@pytest.mark.parametrize("weight_gradient", ["float", "int8"])
def test_products_are_those_of_codes(kind, weight_gradient):
    product, shape, axis, rows = case(kind)
    random = np.random.default_rng(0)
    x, weight, y_bar = (random.normal(size=each) for each in (rows, shape, (*rows[:-1], OUT)))
    x[..., 1, :] *= 1000  # no row or output loses precision to a larger one
    y_bar[..., 3] *= 1000
    y, x_bar, int8, floats = expected(kind, x, weight, y_bar, axis)

    def call(x, weight):
        codes, scales = quantized(jax.lax.stop_gradient(weight), axis)
        options = Options(jnp.float32, axis, weight_gradient, "layer")
        return int8_product(options, x, weight, codes, scales.squeeze(axis), None, product, None)

    found, pull = jax.vjp(call, jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32))
    found_bar, weight_bar = pull(jnp.asarray(y_bar, jnp.float32))
    close(found, y)
    close(found_bar, x_bar)
    close(weight_bar, floats if weight_gradient == "float" else int8)


def close(found, exact):
    """Each row, since the scales differ by row. A tie that float32 rounds the other way changes a row by one code."""
    error = np.abs(np.asarray(found, np.float64).reshape(exact.shape) - exact)
    assert np.median(error) <= 1e-6 * np.abs(exact).max()
    assert (error <= 2e-5 * np.abs(exact).max(-1, keepdims=True) + 1e-12).all()


def test_stochastic_rounding_is_unbiased():
    draws = np.asarray(rounded(jnp.full(10_000, 0.3), jax.random.key(0)), np.float64)
    assert set(draws) == {0, 1}
    assert abs(draws.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / draws.size)
    down = np.asarray(rounded(jnp.full(10_000, -2.9), jax.random.key(1)), np.float64)
    assert set(down) == {-3, -2}
    assert abs(down.mean() + 2.9) < 4 * np.sqrt(0.1 * 0.9 / down.size)
    whole = jnp.arange(-127.0, 128.0)
    np.testing.assert_array_equal(rounded(whole, jax.random.key(2)), whole)
    np.testing.assert_array_equal(rounded(jnp.asarray([127.0001, -127.0001, 1e9]), jax.random.key(3)), [127, -127, 127])


def test_every_row_and_element_draws_its_own_bits():
    product, y_bar = Plain(), jnp.tile(jnp.asarray([1.0] + [0.003] * 63), (32, 1))
    codes, scales = quantized(jax.random.normal(jax.random.key(0), (16, 64)), -2)

    def rows(key):
        def call(x):
            return int8_product(
                Options(jnp.float32, -2, "float", "layer"), x, None, codes, scales[0], None, product, key
            )

        return jax.vjp(call, jnp.ones((32, 16)))[1](y_bar / scales)[0]

    nearest, first, second = rows(None), rows(jax.random.key(1)), rows(jax.random.key(2))
    assert len(np.unique(nearest, axis=0)) == 1
    assert len(np.unique(first, axis=0)) == 32
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_numbers_reach_the_result(bad):
    codes, scales = quantized(jnp.ones((4, 3)), -2)
    x = jnp.ones((2, 4)).at[0, 1].set(bad)
    y = int8_product(Options(jnp.float32, -2, "float", "layer"), x, None, codes, scales[0], None, Plain(), None)
    assert not np.isfinite(y[0]).any() and np.isfinite(y[1]).all()


def test_sums_that_could_overflow_are_refused():
    x = jnp.ones((MAX_TERMS + 1, 1))
    codes, scales = quantized(jnp.ones((1, 1)), -2)
    options = Options(jnp.float32, -2, "int8", "layer")

    def total(weight):
        return int8_product(options, x, weight, codes, scales[0], None, Plain(), None).sum()

    with pytest.raises(ax.ConfigError, match=f"^layer: .* over {MAX_TERMS + 1} rows .* set weight_gradient='float'"):
        jax.eval_shape(jax.grad(total), jnp.ones((1, 1)))
    wide = jax.ShapeDtypeStruct((1, MAX_TERMS + 1), jnp.float32)
    with pytest.raises(ax.ConfigError, match=r"over \d+ inputs .* Exclude the layer"):
        jax.eval_shape(
            lambda x, codes: int8_product(options, x, None, codes, scales[0], None, Plain(), None),
            wide,
            jax.ShapeDtypeStruct((MAX_TERMS + 1, 1), jnp.int8),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"activation_scales": None, "rounding": "stochastic"},
            "rounding='stochastic' has no effect with",
        ),
        (
            {"activation_scales": None, "weight_gradient": "int8"},
            "weight_gradient='int8' has no effect with",
        ),
        ({"percentile": 99.9}, "percentile=99.9 has no effect with activation_scales='dynamic'"),
        ({"percentile": 0.0}, "percentile must be above 0"),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(ax.ConfigError, match=message):
        Int8.Config(shape=(2, 3), input_axis=-2, **options).build(rngs=ax.Rngs(0))


@pytest.mark.parametrize("weight_gradient", ["float", "int8"])
def test_products_without_rows(weight_gradient):
    cfg = Linear.Config(input_dim=8, output_dim=4, numerics=Int8.Config(weight_gradient=weight_gradient))
    fn, params, state = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    x = jnp.ones((2, 0, 8))
    found = jax.grad(lambda params: fn(params, state, x)[0][0].sum())(params)
    np.testing.assert_array_equal(found["weight"], np.zeros((8, 4)))
