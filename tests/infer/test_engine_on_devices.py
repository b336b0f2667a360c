"""An engine on several devices gives the samples of one device, shards its caches, and compiles nothing late."""

import numpy as np
import pytest

from axcore.testing.devices import on_devices

from . import eight_devices

CASES = [  # shape, has pages, is a mixture of experts, on how many devices each cache is divided
    pytest.param("tensor, more devices than kv heads", True, False, 1, marks=pytest.mark.long),
    pytest.param("more devices than rows", False, False, 1, marks=pytest.mark.slow),
    pytest.param("tensor", True, True, 2, marks=pytest.mark.slow),
    pytest.param("tensor", False, False, 2, marks=pytest.mark.slow),
    pytest.param("expert", False, True, 4, marks=pytest.mark.slow),
    pytest.param("data, tensor", False, True, 4, marks=pytest.mark.slow),
    pytest.param("fsdp, expert, tensor", True, True, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "is_paged", "is_mixture", "parts"), CASES)
def test_an_engine_on_several_devices_equals_one(shape, is_paged, is_mixture, parts):
    one, several = on_devices(eight_devices.main, shape, is_paged, is_mixture)
    assert several["ids"] == one["ids"]
    np.testing.assert_allclose(several["logprobs"], one["logprobs"], rtol=0, atol=1e-5)
    assert one["late"] == several["late"] == (0, 0)
    assert len(several["held"]) == 4  # keys and values of two layers
    for path, (on_a_device, whole) in several["held"].items():
        assert whole == one["held"][path][1] == on_a_device * parts, path
