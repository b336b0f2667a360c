"""axcore-rope passes `FeatureSuite`."""

import pytest

from axcore.testing import FeatureSuite

pytestmark = pytest.mark.long


class TestRope(FeatureSuite):
    feature = "rope"


class TestAlibi(FeatureSuite):
    feature = "alibi"


class TestLearnedPositions(FeatureSuite):
    feature = "learned-positions"
    options = {"max_len": 8}
