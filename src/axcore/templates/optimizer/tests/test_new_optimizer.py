"""Tests of axcore-new-optimizer."""

from axcore.testing import OptimizerSuite


class TestLion(OptimizerSuite):
    name = "new-optimizer"
    rate = 3e-3
