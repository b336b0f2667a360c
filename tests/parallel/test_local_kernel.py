"""A `local` kernel runs on the rows, heads and queries of one device, with the same results."""

import jax
import numpy as np
import pytest
from tests.parallel.local_kernel import LocalKernel

import axcore as ax
from axcore.nn import Attention, Normal
from axcore.parallel import Mesh
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.attention_cases import Slopes
from axcore.testing.devices import steps

pytestmark = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [2, 1], ids="{} kv heads".format)
def test_case_a_local_kernel_receives_shards_and_equals_one_device(num_kv_heads):
    """Uses documents, sinks, a bias, dropout, fewer kv heads than devices, and queries sharded over two devices."""
    plain = ax.select(tiny_model(), Attention).set(
        num_kv_heads=num_kv_heads, sinks=Normal(stddev=1.0), bias=Slopes.Config(), dropout=0.25
    )
    local = ax.select(plain, Attention).set(kernel=LocalKernel.Config(num_kv_heads=num_kv_heads))
    batch = jax.tree.map(np.asarray, tiny_batch(rows=8))
    batch["segment_ids"] = np.cumsum(np.arange(8) % 3 == 0)[None].repeat(8, axis=0).astype(np.int32)
    rules = {"batch": "data", "embed": "data", "seq": "context", "head": "tensor", "kv_head": "tensor"}
    shape = {"data": 2, "context": 2, "tensor": 2}
    (one,) = steps(plain, batch, [Mesh(shape=dict.fromkeys(shape, 1), rules=rules)])
    (eight,) = steps(local, batch, [Mesh(shape=shape, rules=rules)])
    np.testing.assert_allclose(eight["loss"], one["loss"], rtol=1e-5)
    assert any("slopes" in path for path in one["updates"])
    assert any("sinks" in path for path in one["updates"])
    for path, update in one["updates"].items():
        assert update.any(), path
        atol = 1e-6 + 1e-4 * np.abs(update).max()
        np.testing.assert_allclose(eight["updates"][path], update, rtol=0, atol=atol, err_msg=path)
