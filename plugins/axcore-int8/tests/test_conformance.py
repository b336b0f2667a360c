"""The numerics of axcore-int8 pass `NumericsSuite`."""

import pytest

import axcore as ax
from axcore.testing import NumericsSuite, tiny_model
from axcore.testing.offer import offered_config


class EveryLayer(NumericsSuite):
    def config(self):
        """The features of the same names leave some layers out."""
        return ax.select(tiny_model(), lambda _, node: hasattr(node, "numerics")).set(numerics=offered_config(self))


@pytest.mark.long
class TestInt8(EveryLayer):
    name = "int8"
    error = 0.02
    gradient_error = 0.02
    stored_bits = 10.0


@pytest.mark.slow
class TestInt8Gradients(TestInt8):
    options = {"weight_gradient": "int8"}


@pytest.mark.slow
class TestStochastic(TestInt8):
    options = {"weight_gradient": "int8", "rounding": "stochastic"}


@pytest.mark.slow
class TestWeightsOnly(TestInt8):
    options = {"activation_scales": None}


@pytest.mark.long
class TestInt4(EveryLayer):
    name = "int4"
    error = 0.1
    gradient_error = 0.1
    model_error = 0.2
    stored_bits = 5.5
