"""The conformance suite, for each scaling."""

import pytest

from axcore.testing import NumericsSuite


class Products(NumericsSuite):
    name = "fp8"
    error = 0.06
    gradient_error = 0.07
    model_error = 0.12
    stored_bits = 9.0
    stored_error = 0.05


@pytest.mark.long
class TestCurrent(Products):
    pass


@pytest.mark.slow
class TestDelayed(Products):
    options = {"scaling": "delayed", "amax_history_len": 4}


@pytest.mark.slow
class TestBlock(Products):
    options = {"scaling": "block"}
    gradient_error = 0.045


@pytest.mark.slow
class TestWeightOnly(NumericsSuite):
    name = "fp8"
    options = {"weight_only": True}
    error = 0.04
    gradient_error = 0.03
    stored_bits = 9.0
