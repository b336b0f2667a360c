"""axcore-moe keeps to what every feature must."""

from axcore.testing import FeatureSuite


class TestMoe(FeatureSuite):
    feature = "moe"
    options = {"num_experts": 4}
