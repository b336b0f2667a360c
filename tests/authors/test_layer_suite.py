"""`LayerSuite` for a layer that returns several arrays: it passes if they are correct and fails if any is wrong."""

import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Ones
from axcore.testing import LayerSuite

pytestmark = pytest.mark.long


class Pair(ax.Layer):
    """`(scale * x, y ** 2)`, as a layer in a position slot returns two arrays."""

    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        self.scale = self.param("scale", (cfg.input_dim,), Ones(), rngs, axes=("embed",))

    def __call__(self, x, y):
        return x * self.scale[...].astype(x.dtype), jnp.square(y)


class TestPair(LayerSuite):
    def config(self):
        return Pair.Config(input_dim=6)

    def inputs(self, random):
        return random.normal(size=(2, 3, 6)), random.normal(size=(2, 4))

    def reference(self, params, x, y):
        return x * params["scale"], y**2


@pytest.mark.parametrize(
    "reference",
    [
        lambda self, params, x, y: (x * params["scale"], y**3),
        lambda self, params, x, y: (x * params["scale"] ** 2, y**2),
    ],
)
def test_a_mistake_in_either_output_is_found(reference):
    suite = type("Wrong", (TestPair,), {"reference": reference, "__test__": False})()
    for check in (suite.test_outputs_equal_the_formula, suite.test_gradients_equal_the_formula):
        with pytest.raises(AssertionError):
            check()


def test_an_output_missing_from_the_reference_is_found():
    def reference(self, params, x, y):
        return np.asarray(x * params["scale"])

    suite = type("Wrong", (TestPair,), {"reference": reference, "__test__": False})()
    with pytest.raises(AssertionError):
        suite.test_outputs_equal_the_formula()
