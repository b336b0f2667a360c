"""The KV cache of the core passes the suite for plugin caches."""

import numpy as np
import pytest

from axcore.testing import KVCacheSuite

pytestmark = pytest.mark.long


class TestContiguous(KVCacheSuite):
    name = "contiguous"


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 1, 5)], ids=str)
def test_in_a_window_the_mask_hides_old_keys(sizes):
    suite = type("Windowed", (TestContiguous,), {"window": 3})()
    np.testing.assert_allclose(suite._decoded(sizes), suite._recomputed(), rtol=0, atol=suite.exact)
    plain = TestContiguous()._recomputed()
    assert np.abs(suite._recomputed() - plain)[:, 3:].max() > 1e-3
