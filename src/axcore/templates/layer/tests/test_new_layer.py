"""axcore-new-layer passes the feature suite, and its gate equals the formula."""

import numpy as np

from axcore.testing import FeatureSuite, LayerSuite
from axcore_new_layer.gate import HeadGate


class TestFeature(FeatureSuite):
    feature = "new-layer"


class TestHeadGate(LayerSuite):
    def config(self):
        return HeadGate.Config(input_dim=8, num_heads=4)

    def inputs(self, random):
        return random.normal(size=(2, 3, 8)), random.normal(size=(2, 3, 4, 5))

    def reference(self, params, x, heads):
        gate = 1 / (1 + np.exp(-(x @ params["gate.weight"] + params["gate.bias"])))
        return heads * gate[..., None]
