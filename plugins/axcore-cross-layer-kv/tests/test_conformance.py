"""axcore-cross-layer-kv passes `FeatureSuite`."""

import pytest

import axcore as ax
from axcore.nn import Repeat
from axcore.testing import FeatureSuite

pytestmark = pytest.mark.long


class TestCrossLayerKV(FeatureSuite):
    feature = "cross-layer-kv"

    def model(self):
        return ax.select(super().model(), Repeat).set(num_layers=4)  # two groups
