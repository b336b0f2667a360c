"""Decoding from pages on a mesh: the pool is sharded over kv heads, and logits equal those on one device."""

import numpy as np
import pytest

from axcore.testing.devices import on_devices

from . import eight_devices


@pytest.mark.slow
def test_decoding_on_a_mesh_equals_one_device():
    for found in on_devices(eight_devices.main).values():
        np.testing.assert_allclose(found["eight"], found["one"], rtol=0, atol=2e-6)
        assert set(found["shards"].values()) == {2}
