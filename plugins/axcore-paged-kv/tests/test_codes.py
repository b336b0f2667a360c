"""Codes: rounding, and decoding from coded pages against recomputation with rounded keys and values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import functional
from axcore.nn import Attention, KVCache, Normal
from axcore.nn.kv.codes import decoded, encoded
from axcore.testing import tiny_model
from axcore_paged_kv.cache import PagedCache

STEPS = {"int8": 127, "float8_e4m3fn": 448}
"""Dtype -> its largest number."""


def rounded(x, dtype):
    """NumPy float64."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max(-1, keepdims=True) / STEPS[dtype]
    ratio = x / np.where(scale == 0, 1, scale)
    if dtype == "int8":
        return np.round(ratio) * scale
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(ratio), 1e-30))), -6)  # subnormal below 2**-6
    step = 2.0 ** (exponent - 3)
    return np.round(ratio / step) * step * scale


@pytest.mark.parametrize("dtype", STEPS)
def test_codes_equal_rounding_in_float64(dtype):
    x = np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32) * 10.0 ** np.arange(-2, 3)[:, None, None]
    x[0, 0] = 0
    codes, scales = encoded(jnp.asarray(x), dtype)
    assert (codes.dtype, scales.dtype, scales.shape) == (jnp.dtype(dtype), jnp.float32, (5, 3))
    found = np.asarray(decoded((codes, codes), (scales, scales), jnp.float32)[0])
    assert not found[0, 0].any()
    # A number halfway between two codes may go to either, as the scale is rounded to float32.
    halfway = np.abs(found - rounded(x, dtype)) > 1e-6 * np.abs(x).max(-1, keepdims=True)
    assert halfway.mean() < 0.02
    bound = np.abs(x) / 16 + scales[..., None] * 2.0**-10 if dtype != "int8" else scales[..., None] / 2
    assert (np.abs(found - x) <= bound * (1 + 1e-5)).all()


class Rounded(KVCache):
    """Stores nothing. Rounds keys and values."""

    class Config(KVCache.Config):
        dtype: str

    def __call__(self, inputs):
        kv, dtype = inputs.plain, self.config.dtype
        (k, k_scale), (v, v_scale) = encoded(kv.k, dtype), encoded(kv.v, dtype)
        k, v = decoded((k, v), (k_scale, v_scale), kv.k.dtype)
        return inputs.replace(kv=dataclasses.replace(kv, k=k, v=v))


@pytest.mark.parametrize(
    "dtype", [pytest.param("int8", marks=pytest.mark.long), pytest.param("float8_e4m3fn", marks=pytest.mark.slow)]
)
def test_decoding_from_codes_equals_recomputation_with_rounded_keys(dtype):
    ids = jax.random.randint(jax.random.key(4), (2, 7), 0, 32)
    cfg = ax.select(tiny_model(), "embedding").set(init=Normal(stddev=1.0))
    reference = ax.select(cfg, Attention).set(cache=Rounded.Config(dtype=dtype)).build(rngs=ax.Rngs(0))
    fn, params, state = functional(reference)
    expected = np.asarray(jax.jit(lambda ids: fn(params, state, ids)[0][0])(ids))
    cache = PagedCache.Config(page_size=3, dtype=dtype)
    decoder, params, state = Decoder.of(cfg.build(rngs=ax.Rngs(0)), cache=cache, batch_size=2, max_len=8)
    step, tables = jax.jit(decoder.__call__), jnp.asarray([[5, 0, 2], [4, 1, 3]])
    logits, state = step(params, state, Step(ids[:, :4], jnp.zeros(2, jnp.int32), pages=tables))
    np.testing.assert_allclose(logits, expected[:, :4], rtol=0, atol=2e-5)
    for at in range(4, 7):
        logits, state = step(params, state, Step(ids[:, at : at + 1], jnp.full((2,), at), pages=tables))
        np.testing.assert_allclose(logits, expected[:, at : at + 1], rtol=0, atol=2e-5)
