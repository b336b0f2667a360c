"""The ring cache passes the suites for KV caches and offers, with several sizes."""

import pytest

import axcore as ax
from axcore.plugin import Feature
from axcore.testing import KVCacheSuite, OfferSuite, tiny_model

pytestmark = pytest.mark.long


class TestRing(KVCacheSuite):
    """Steps of up to three tokens are in place, longer ones are not."""

    name = "ring-kv"
    options = {"window": 3, "spare": 2}
    window = 3


@pytest.mark.slow
class TestLargeRing(KVCacheSuite):
    """All steps are in place."""

    name = "ring-kv"
    options = {"window": 4, "spare": 11}
    window = 4


@pytest.mark.slow
class TestExactRing(KVCacheSuite):
    """Single tokens are in place."""

    name = "ring-kv"
    options = {"window": 4, "spare": 0}
    window = 4
    rollback = 1


@pytest.mark.slow
class TestInt8(KVCacheSuite):
    name = "ring-kv"
    options = {"window": 4, "spare": 2, "dtype": "int8"}
    window = 4
    exact = 0.05


class TestFeature(OfferSuite):
    kind = Feature
    name = "ring-kv"

    def config(self):
        return ax.pipe(tiny_model(), ax.use("sliding-window", size=3), ax.use("ring-kv", spare=2))
