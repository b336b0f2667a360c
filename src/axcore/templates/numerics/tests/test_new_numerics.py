"""axcore-new-numerics approximates the exact product."""

import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Plain
from axcore.testing import NumericsSuite
from axcore_new_numerics.integers import Integers


class TestIntegers(NumericsSuite):
    name = "new-numerics"
    error = 0.02
    gradient_error = 0.01
    stored_bits = 10.0


def test_scales_are_per_token_and_per_output():
    """A token or an output that is a thousand times larger than the others does not reduce their precision."""
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(6, 32)), random.normal(size=(32, 5))
    x[2] *= 1000
    weight[:, 3] *= 1000
    exact = x @ weight
    numerics = Integers.Config(shape=(32, 5), input_axis=-2).build(rngs=ax.Rngs(0))
    error = np.abs(np.asarray(numerics(jnp.asarray(x), jnp.asarray(weight), Plain())) - exact)
    assert (error / (np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=0))).max() < 0.01


@pytest.mark.parametrize("bits", [1, 9])
def test_unsupported_bits_raise(bits):
    with pytest.raises(ax.ConfigError, match=f"bits must be at least 2 and at most 8, not {bits}"):
        Integers.Config(shape=(2, 3), input_axis=-2, bits=bits).build(rngs=ax.Rngs(0))
