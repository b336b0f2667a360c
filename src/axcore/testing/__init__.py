"""Suites that plugin authors subclass and run."""

from axcore.testing.feature import FeatureSuite

__all__ = ["FeatureSuite"]
