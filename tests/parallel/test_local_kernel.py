"""A kernel that says `local` runs on the rows and heads of one device, and changes no number."""

import jax
import numpy as np
from tests.parallel.local_kernel import LocalKernel

import axcore as ax
from axcore.nn import Attention, Normal
from axcore.parallel import Mesh
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.devices import steps


def test_on_eight_devices_a_local_kernel_sees_its_shards_and_gives_the_gradients_of_one():
    attention = {"sinks": Normal(stddev=1.0)}
    plain = ax.select(tiny_model(), Attention).set(**attention)
    local = ax.select(tiny_model(), Attention).set(kernel=LocalKernel.Config(), **attention)
    batch = jax.tree.map(np.asarray, tiny_batch(rows=8))
    batch["segment_ids"] = np.cumsum(np.arange(8) % 3 == 0)[None].repeat(8, axis=0).astype(np.int32)
    rules = {"batch": ("data", "fsdp"), "embed": "fsdp", "head": "tensor", "kv_head": "tensor"}
    shape = {"data": 2, "fsdp": 2, "tensor": 2}
    (one,) = steps(plain, batch, [Mesh(shape=dict.fromkeys(shape, 1), rules=rules)])
    (eight,) = steps(local, batch, [Mesh(shape=shape, rules=rules)])
    np.testing.assert_allclose(eight["loss"], one["loss"], rtol=1e-5)
    for path, update in one["updates"].items():
        atol = 1e-6 + 1e-4 * np.abs(update).max()
        np.testing.assert_allclose(eight["updates"][path], update, rtol=0, atol=atol, err_msg=path)
