"""Conformance suites that plugin authors subclass."""

import pkgutil

import pytest

# Before they are imported, so that a failing assert shows the values that it compares.
pytest.register_assert_rewrite(*(f"axcore.testing.{module.name}" for module in pkgutil.iter_modules(__path__)))

from axcore.testing.drafter import DrafterSuite  # noqa: E402
from axcore.testing.feature import FeatureSuite  # noqa: E402
from axcore.testing.grammar_compiler import GrammarCompilerSuite  # noqa: E402
from axcore.testing.grouped_matmul import GroupedMatmulSuite  # noqa: E402
from axcore.testing.kernel import KernelSuite  # noqa: E402
from axcore.testing.kernel_requests import RequestSuite, training_request  # noqa: E402
from axcore.testing.kv_cache import KVCacheSuite  # noqa: E402
from axcore.testing.layer import LayerSuite  # noqa: E402
from axcore.testing.models import shrunk, tiny_batch, tiny_model  # noqa: E402
from axcore.testing.numerics import NumericsSuite  # noqa: E402
from axcore.testing.offer import OfferSuite  # noqa: E402
from axcore.testing.optimizer import OptimizerSuite  # noqa: E402
from axcore.testing.paged_cache import PagedCacheSuite  # noqa: E402
from axcore.testing.parallelism import ParallelismSuite  # noqa: E402
from axcore.testing.recipe import RecipeSuite  # noqa: E402
from axcore.testing.recurrent import RecurrentSuite  # noqa: E402

__all__ = [
    "DrafterSuite",
    "FeatureSuite",
    "GrammarCompilerSuite",
    "GroupedMatmulSuite",
    "KVCacheSuite",
    "KernelSuite",
    "LayerSuite",
    "NumericsSuite",
    "OfferSuite",
    "OptimizerSuite",
    "PagedCacheSuite",
    "ParallelismSuite",
    "RecipeSuite",
    "RecurrentSuite",
    "RequestSuite",
    "shrunk",
    "tiny_batch",
    "tiny_model",
    "training_request",
]


def __dir__() -> list[str]:
    return __all__
