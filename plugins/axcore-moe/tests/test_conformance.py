"""axcore-moe keeps to what every feature must."""

import pytest

from axcore.testing import FeatureSuite

pytestmark = pytest.mark.long


class TestMoe(FeatureSuite):
    feature = "moe"
    options = {"num_experts": 4}
