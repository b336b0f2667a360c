"""The conformance suite, for each scaling."""

import pytest

from axcore.testing import NumericsSuite

pytestmark = pytest.mark.long


class TestCurrent(NumericsSuite):
    name = "fp8"
    error = 0.05
    gradient_error = 0.07
    stored_bits = 9.0
    stored_error = 0.05
    model_error = 0.12


class TestDelayed(TestCurrent):
    options = {"scaling": "delayed", "amax_history_len": 4}


class TestBlock(TestCurrent):
    options = {"scaling": "block"}
    gradient_error = 0.045


class TestWeightOnly(NumericsSuite):
    name = "fp8"
    options = {"weight_only": True}
    error = 0.03
    gradient_error = 0.03
    stored_bits = 9.0
