"""axcore-cross-layer-kv passes `FeatureSuite`."""

import pytest

from axcore.testing import FeatureSuite

pytestmark = pytest.mark.long


class TestCrossLayerKV(FeatureSuite):
    feature = "cross-layer-kv"
    replaces = ("decoder.?.attention.key.weight", "decoder.?.attention.value.weight")
    changes_initialization = ("decoder.*",)  # the stack becomes two groups of two layers
