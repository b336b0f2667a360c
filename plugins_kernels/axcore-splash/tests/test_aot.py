"""Splash attention compiled for TPU topologies by libtpu, without a TPU."""

import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from axcore_splash.blocks import Blocks
from axcore_splash.fused import attention
from axcore_splash.primitives import Form

TOPOLOGIES = ("v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="requires libtpu (axcore[aot-tpu])"),
]


@pytest.fixture(autouse=True)
def libtpu(monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    path = importlib.util.find_spec("libtpu").submodule_search_locations[0]
    monkeypatch.setenv("TPU_LIBRARY_PATH", os.path.join(path, "libtpu.so"))


def kernels(topology, form, seq=1024, head_dim=128, value_dim=None, dtype="bfloat16", sinks=False, keep=None):
    """The number of kernels in the program of the heads and all gradients; with remat that keeps the values `keep`."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    q, k = array(2, seq, 8, head_dim), array(2, seq, 2, head_dim)
    v, ids = array(2, seq, 2, value_dim or head_dim), array(2, seq, dtype="int32")
    args = q, k, v, array(8, dtype="float32") if sinks else None, ids

    def loss(q, k, v, sinks, ids):
        def heads(q, k, v):
            return attention(form, q, k, v, (ids, ids), sinks)[0]

        if keep is not None:
            heads = jax.checkpoint(heads, policy=jax.checkpoint_policies.save_only_these_names(*keep))
        return heads(q, k, v).astype(jnp.float32).sum()

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*args).compile()
    return compiled.as_text().count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("fused", "count"), [(False, 3), (True, 2)])
def test_every_tpu_compiles_the_kernels(topology, fused, count):
    assert kernels(topology, Form(scale=0.1, blocks=Blocks(fused_backward=fused))) == count


@pytest.mark.parametrize(
    "call",
    [
        {"head_dim": 64},
        {"head_dim": 96},
        {"head_dim": 256, "dtype": "float32"},
        {"head_dim": 192, "value_dim": 128},
        {"seq": 257},
        {"seq": 640, "sinks": True, "form": Form(scale=0.1, window=100, softcap=30.0)},
        {"seq": 640, "form": Form(scale=0.1, causal=False)},
        {
            "seq": 4096,
            "form": Form(scale=0.1, blocks=Blocks(block_q=1024, block_kv=1024, block_kv_compute=512, block_q_dkv=1024)),
        },
    ],
    ids=str,
)
def test_mosaic_accepts_the_shapes(call):
    assert kernels("v5e:1x1", call.pop("form", Form(scale=0.1)), **call) == 3


@pytest.mark.parametrize(("keep", "count"), [(("heads", "lse"), 3), (("heads",), 4), ((), 4)])
def test_remat_that_keeps_heads_and_lse_runs_the_forward_kernel_once(keep, count):
    assert kernels("v5e:1x1", Form(scale=0.1), keep=keep) == count
