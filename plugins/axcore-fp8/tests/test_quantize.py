"""Scales and codes against NumPy and ml_dtypes."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from axcore_fp8.quantize import BLOCK, E4M3, E5M2, amax_of, overflows, quantize, quantize_blocks, scale_of

LARGEST = {E4M3: 448.0, E5M2: 57344.0}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_the_next_power_of_two(dtype):
    amax = np.concatenate([np.float32(2.0) ** np.arange(-90, 90, 7) * LARGEST[dtype], [1e-20, 3.0, 447.0, 449.0, 1e20]])
    found = np.asarray(scale_of(jnp.asarray(amax, jnp.float32), dtype), np.float64)
    expected = 2.0 ** np.ceil(np.log2(np.float32(amax).astype(np.float64) / LARGEST[dtype]))
    np.testing.assert_array_equal(found, expected)


def test_scales_of_zeros_and_of_numbers_that_are_not_finite():
    found = scale_of(jnp.asarray([0.0, np.inf, np.nan]), E4M3)
    np.testing.assert_array_equal(found, [1.0, np.nan, np.nan])


def test_scales_are_normal_numbers():
    """A subnormal scale, which devices flush to 0, would give NaN."""
    found = scale_of(jnp.asarray([2e-38, 1e-36, 1e-30], jnp.float32), E5M2)
    assert (np.asarray(found) >= np.finfo(np.float32).tiny).all()
    assert np.isfinite(quantize(jnp.float32(1e-36), E5M2, found[1]).codes.astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_are_the_nearest_numbers(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)), dtype)
    made = quantize(x, E4M3, scale_of(amax_of(x), E4M3))
    scale = float(made.scale)
    expected = (np.asarray(x, np.float32) / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    np.testing.assert_array_equal(np.asarray(made.dequantized(jnp.bfloat16), np.float64), expected)
    assert np.abs(made.codes.astype(jnp.float32)).max() > 224  # the range is used


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("exponent", [-126, -60, 0, 60, 110])
def test_scaling_is_exact(dtype, exponent):
    """For scales from the smallest normal number to that of the largest floats."""
    codes = jnp.arange(256, dtype=jnp.uint8).view(dtype).astype(jnp.float32)
    codes, scale = codes[jnp.isfinite(codes)], jnp.float32(2.0**exponent)
    x = jnp.asarray(np.asarray(codes, np.float64) * 2.0**exponent, jnp.float32)
    is_normal = np.abs(np.asarray(x)) >= np.finfo(np.float32).tiny  # devices flush the others to 0
    found = quantize(x, dtype, scale).codes.astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(found)[is_normal], np.asarray(codes)[is_normal])


def test_numbers_out_of_range_saturate_and_nan_remains():
    """A scale that is NaN makes infinities visible."""
    x = jnp.asarray([1.0, 1000.0, -1000.0, np.inf, -np.inf, np.nan])
    found = quantize(x, E4M3, jnp.float32(1.0)).dequantized(jnp.float32)
    np.testing.assert_array_equal(found, [1.0, 448.0, -448.0, 448.0, -448.0, np.nan])
    assert np.isnan(quantize(x, E4M3, scale_of(amax_of(x), E4M3)).dequantized(jnp.float32)).all()


@pytest.mark.parametrize(("amax", "out"), [(448.0, False), (449.0, True), (np.inf, True), (np.nan, True)])
def test_overflow(amax, out):
    assert bool(overflows(jnp.float32(amax), jnp.float32(1.0), E4M3)) == out


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("shape", [(300, 200), (2, 128, 256), (1, 3)], ids=str)
def test_each_block_has_its_own_scale(shape, dims):
    random = np.random.default_rng(0)
    x = random.normal(size=shape).astype(np.float32)
    x[..., :1, :1] *= 1e6  # one large number only affects its block
    found = np.asarray(quantize_blocks(jnp.asarray(x), E4M3, dims).dequantized(jnp.float32), np.float64)
    rows = BLOCK if dims == 2 else 1
    for index in np.ndindex(shape[:-2]):
        for i in range(0, shape[-2], rows):
            for j in range(0, shape[-1], BLOCK):
                block = x[index][i : i + rows, j : j + BLOCK]
                scale = 2.0 ** np.ceil(np.log2(np.abs(block).max().astype(np.float64) / 448))
                expected = (block / np.float32(scale)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
                np.testing.assert_array_equal(found[index][i : i + rows, j : j + BLOCK], expected)
