"""axcore-diff-attention passes `FeatureSuite`."""

import pytest

import axcore as ax
from axcore.nn import Attention
from axcore.testing import FeatureSuite

pytestmark = pytest.mark.long


class TestDiffAttention(FeatureSuite):
    feature = "diff-attention"

    def model(self):
        """A model whose attention has RoPE, a softcap, a custom scale and grouped queries."""
        cfg = ax.use("rope")(super().model())
        return ax.select(cfg, Attention).set(softcap=30.0, scale=0.2, num_heads=8, num_kv_heads=4)
