"""axcore-moe passes `FeatureSuite`."""

import pytest

from axcore.testing import FeatureSuite

pytestmark = pytest.mark.long


class TestMoe(FeatureSuite):
    feature = "moe"
    options = {"num_experts": 4}
    replaces = ("decoder.*.ffn.*",)
