"""Implementations of products that run on shards of a matrix (`Matmul.is_local`)."""

import numpy as np
import pytest

from axcore.testing.devices import on_devices

from . import sharded_products

pytestmark = pytest.mark.long

SHARDS = {  # of a matrix [16, 8], and the number of all-reduces; none where XLA computes the product
    "columns": ((16, 2), 0),
    "rows": ((4, 8), 1),
    "columns, inputs sharded": ((8, 4), 1),
    "rows, over both axes": ((4, 8), 1),
    "replicated": ((16, 8), 0),
    "axes not known": (None, 0),
    "not divisible": (None, 0),
    "several rows": (None, 0),
}


def test_a_local_product_gets_shards_and_equals_that_of_one_device() -> None:
    for (name, scaled), (one, several, seen, collectives) in on_devices(sharded_products.main).items():
        shards, all_reduces = SHARDS[name]
        assert seen == ({shards} if shards else set()), (name, scaled)
        assert collectives == ["all-reduce"] * all_reduces, (name, scaled)
        for expected, found in zip(one, several, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)
