"""`Gemv` on several devices, in interpret mode: each multiplies by its shard of the matrix."""

import numpy as np
import pytest

from axcore.testing.devices import on_devices

from . import eight_devices

pytestmark = pytest.mark.long

SHARDS = {  # of a matrix [32, 64]; a shard with columns that are not whole words stays with XLA
    "columns": (8, 64),
    "rows": (32, 16),
    "head": (16, 64),
    "columns, inputs sharded": (16, 32),
}


def test_products_equal_those_of_one_device() -> None:
    for (name, codes), (one, several, seen) in on_devices(eight_devices.products).items():
        shards = SHARDS.get(name, None if codes else (32, 2))
        assert seen == ({shards} if shards else set()), name
        np.testing.assert_allclose(several, one, rtol=1e-6, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("codes", [False, True])
def test_an_engine_equals_one_on_one_device(codes: bool) -> None:
    plain, several = on_devices(eight_devices.engines, (2, 4), codes)
    assert not plain["seen"]
    for found, tensor in zip(several, (2, 4), strict=True):
        assert found["ids"] == plain["ids"]
        np.testing.assert_allclose(found["logprobs"], plain["logprobs"], rtol=0, atol=1e-5)
        wide = {(outputs // tensor, 16) for outputs in (8, 16, 32)}
        assert found["seen"] == wide | {(16, inputs // tensor) for inputs in (16, 32)}
