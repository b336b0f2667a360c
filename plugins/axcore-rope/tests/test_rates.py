"""The rates of each scaling against its published formula, pair by pair in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore_rope.scaling import DynamicNTK, Linear, Llama3, LongRoPE, YaRN

DIM, THETA, ORIGINAL = 32, 10_000.0, 256
RATES = [THETA ** (-2 * pair / DIM) for pair in range(DIM // 2)]


def linear(rate, pair, length):
    return rate / 4


def dynamic(rate, pair, length):
    base = THETA if length <= ORIGINAL else THETA * (3 * length / ORIGINAL - 2) ** (DIM / (DIM - 2))
    return base ** (-2 * pair / DIM)


def yarn(rate, pair, length):
    """Interpolates between the pairs that rotate 8 times and once in a training row, rounded outwards."""

    def pair_of(times):  # solves ORIGINAL * rate / (2 pi) = times
        return DIM / 2 * math.log(ORIGINAL / (2 * math.pi * times), THETA)

    first, last = math.floor(pair_of(8)), math.ceil(pair_of(1))
    assert 0 < first < last < DIM // 2
    kept = min(max((last - pair) / (last - first), 0), 1)
    return kept * rate + (1 - kept) * rate / 4


def yarn_exact(rate, pair, length):
    """Like `yarn` without rounding. Linear in the pair, and therefore in the logarithm of its wavelength."""
    longest, shortest = math.log(ORIGINAL / 1), math.log(ORIGINAL / 8)
    wavelength = math.log(2 * math.pi / rate)
    kept = min(max((longest - wavelength) / (longest - shortest), 0), 1)
    return kept * rate + (1 - kept) * rate / 4


def llama3(rate, pair, length):
    wavelength = 2 * math.pi / rate
    if wavelength < ORIGINAL / 4:
        return rate
    if wavelength > ORIGINAL / 2:
        return rate / 8
    smooth = (ORIGINAL / wavelength - 2) / (4 - 2)
    return (1 - smooth) * rate / 8 + smooth * rate


SHORT, LONG = [1 + 0.1 * pair for pair in range(DIM // 2)], [2 + 0.3 * pair for pair in range(DIM // 2)]


def longrope(rate, pair, length):
    return rate / (LONG if length > ORIGINAL else SHORT)[pair]


CASES = [
    (Linear(factor=4.0), linear),
    (DynamicNTK(factor=3.0, original_max=ORIGINAL), dynamic),
    (YaRN(factor=4.0, original_max=ORIGINAL, beta_fast=8.0), yarn),
    (YaRN(factor=4.0, original_max=ORIGINAL, beta_fast=8.0, truncate=False), yarn_exact),
    (Llama3(factor=8.0, original_max=ORIGINAL, low_freq_factor=2.0), llama3),
    (LongRoPE(short=tuple(SHORT), long=tuple(LONG), original_max=ORIGINAL), longrope),
]


@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 1, 5000])
@pytest.mark.parametrize(("scaling", "formula"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_rates_match_the_published_formula(scaling, formula, length):
    found = jax.jit(lambda length: jnp.asarray(scaling.rates(THETA, DIM, length)))(length)
    expected = [formula(rate, pair, length) for pair, rate in enumerate(RATES)]
    np.testing.assert_allclose(found, expected, rtol=3e-6)
    assert not np.allclose(expected, RATES, rtol=1e-3) or (formula is dynamic and length < 5000)


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        (Linear(factor=4.0), 1.0),
        (DynamicNTK(factor=4.0, original_max=8), 1.0),
        (Llama3(factor=4.0, original_max=8), 1.0),
        (YaRN(factor=4.0, original_max=8), 0.1 * math.log(4) + 1),
        (YaRN(factor=0.5, original_max=8), 1.0),
        (YaRN(factor=40.0, original_max=8, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (LongRoPE(short=(), long=(), original_max=4096, factor=32.0), math.sqrt(1 + math.log(32) / math.log(4096))),
        (LongRoPE(short=(), long=(), original_max=4096, factor=32.0, attention_factor=1.25), 1.25),
    ],
)
def test_attention_scaling(scaling, factor):
    assert scaling.attention_scaling == pytest.approx(factor, rel=1e-12)
