"""axcore-lora passes `FeatureSuite`. A has no gradient while B is zero."""

from typing import Any, ClassVar

import pytest

from axcore.testing import FeatureSuite

pytestmark = pytest.mark.long


class TestLora(FeatureSuite):
    feature = "lora"
    options: ClassVar[dict[str, Any]] = {"rank": 2, "dropout": 0.1}
    changes_outputs = False
    zero_gradients = ("adapter.a",)


@pytest.mark.slow
class TestDora(FeatureSuite):
    feature = "lora"
    options: ClassVar[dict[str, Any]] = {"rank": 2, "dora": True}
    changes_outputs = False
    zero_gradients = ("adapter.a",)
