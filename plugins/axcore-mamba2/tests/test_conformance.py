"""axcore-mamba2 passes `FeatureSuite`."""

import pytest

from axcore.testing import FeatureSuite

pytestmark = pytest.mark.long


class TestMamba2(FeatureSuite):
    feature = "mamba2"
    options = {"state_dim": 8, "head_dim": 8, "num_groups": 2, "chunk": 3}
    replaces = ("decoder.*.attention.*",)
    replicated = ("*.B_conv.weight", "*.C_conv.weight")  # every head reads them
