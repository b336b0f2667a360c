"""axcore-diff-attention passes the suite of features."""

import pytest

import axcore as ax
from axcore.nn import Attention
from axcore.testing import FeatureSuite

pytestmark = pytest.mark.long


class TestDiffAttention(FeatureSuite):
    feature = "diff-attention"

    def model(self):
        """With all other options of an attention."""
        cfg = ax.use("rope")(super().model())
        return ax.select(cfg, Attention).set(softcap=30.0, scale=0.2, num_heads=8, num_kv_heads=4)
