"""axcore-new-recurrent passes the feature suite, and its layer equals the formula, also while decoding."""

import numpy as np

from axcore.testing import FeatureSuite, RecurrentSuite
from axcore_new_recurrent.min_gru import MinGRU


class TestFeature(FeatureSuite):
    feature = "new-recurrent"
    options = {"hidden_dim": 24}
    replaces = ("decoder.*.attention.*",)


class TestMinGRU(RecurrentSuite):
    def config(self):
        return MinGRU.Config(input_dim=6, hidden_dim=4)

    def reference(self, params, x):
        z = 1 / (1 + np.exp(-(x @ params["gate.weight"] + params["gate.bias"])))
        added, hidden, last = z * (x @ params["candidate.weight"]), [], 0
        for t in range(x.shape[1]):
            last = (1 - z[:, t]) * last + added[:, t]
            hidden.append(last)
        return np.stack(hidden, axis=1) @ params["projection.weight"]
