"""axcore-new-quantizer computes nearly the exact product, and the integers that it says."""

import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.testing import QuantizerSuite
from axcore_new_quantizer.integers import Integers, integer_matmul


class TestIntegers(QuantizerSuite):
    name = "new-quantizer"
    error = 0.02
    gradient_error = 1e-4


def test_units_are_per_token_and_per_output():
    """A token or an output a thousand times as large as the others costs them no precision."""
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(6, 32)), random.normal(size=(32, 5))
    x[2] *= 1000
    weight[:, 3] *= 1000
    exact = x @ weight
    error = np.abs(np.asarray(integer_matmul(jnp.asarray(x), jnp.asarray(weight), 127)) - exact)
    assert (error / (np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=0))).max() < 0.01


@pytest.mark.parametrize("bits", [1, 9])
def test_other_widths_are_refused(bits):
    with pytest.raises(ax.ConfigError, match=f"bits must be from 2 to 8, not {bits}"):
        Integers.Config(bits=bits).build(rngs=ax.Rngs(0))
