"""axcore-rope keeps to what every feature must."""

from axcore.testing import FeatureSuite


class TestRope(FeatureSuite):
    feature = "rope"
