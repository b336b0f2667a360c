"""The suites, applied to classes of the core and the recipes."""

import numpy as np
import pytest

import axcore as ax
from axcore.nn import FeedForward, Linear, Repeat, RMSNorm
from axcore.testing import LayerSuite, OptimizerSuite, RecipeSuite


class TestRMSNorm(LayerSuite):
    maps_to_itself = True

    def config(self):
        return RMSNorm.Config(input_dim=6)

    def inputs(self, random):
        return (random.normal(size=(2, 3, 6)),)

    def reference(self, params, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["scale"]


class TestLinear(LayerSuite):
    def config(self):
        return Linear.Config(input_dim=6, output_dim=4, use_bias=True, axes=("embed", "mlp"))

    def inputs(self, random):
        return (random.normal(size=(2, 3, 6)),)

    def reference(self, params, x):
        return x @ params["weight"] + params["bias"]


@pytest.mark.long
class TestAdamW(OptimizerSuite):
    name = "adamw"


@pytest.mark.long
class TestQuickstart(RecipeSuite):
    name = "quickstart"


@pytest.mark.long
class TestLlama2(RecipeSuite):
    name = "llama2-7b"

    def shrink(self, model):
        small = ax.select(model, Repeat).set(num_layers=2)
        small = ax.select(small, FeedForward).set(hidden_dim=64)
        return small.set(dim=128, vocab_size=64)
