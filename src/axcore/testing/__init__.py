"""Conformance suites that plugin authors subclass."""

from axcore.testing.feature import FeatureSuite
from axcore.testing.kernel import KernelSuite
from axcore.testing.kv_cache import KVCacheSuite
from axcore.testing.layer import LayerSuite
from axcore.testing.models import tiny_batch, tiny_model
from axcore.testing.numerics import NumericsSuite
from axcore.testing.offer import OfferSuite
from axcore.testing.optimizer import OptimizerSuite
from axcore.testing.parallelism import ParallelismSuite
from axcore.testing.recipe import RecipeSuite

__all__ = [
    "FeatureSuite",
    "KVCacheSuite",
    "KernelSuite",
    "LayerSuite",
    "NumericsSuite",
    "OfferSuite",
    "OptimizerSuite",
    "ParallelismSuite",
    "RecipeSuite",
    "tiny_batch",
    "tiny_model",
]


def __dir__() -> list[str]:
    return __all__
