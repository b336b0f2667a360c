"""axcore-mamba2 keeps to what every feature must."""

from axcore.testing import FeatureSuite


class TestMamba2(FeatureSuite):
    feature = "mamba2"
    options = {"state_dim": 8, "head_dim": 8, "num_groups": 2, "chunk": 3}
