"""The NKI kernel: supported requests, and numerical results with the documented contract in place of nkilib.

The kernels have not run on Trainium. See `contract.py` for what stands for them elsewhere.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Causal, Full, SameSegment, SlidingWindow
from axcore.testing import KernelSuite, RequestSuite, tiny_model, training_request
from axcore.testing.devices import on_devices
from axcore.train import CrossEntropy
from axcore_nki.kernel import NkiKernel


class TestRequests(RequestSuite):
    name = "nki"
    kernel = NkiKernel.Config(head_dim=128)
    request = training_request("neuron", "NC_v3d", query_len=2048, key_len=2048)
    supported = [
        {"packed": False},
        {"mask": Full() & SameSegment()},
        {"mask": Causal() & SlidingWindow(size=4)},
        {"mask": Causal() & SameSegment() & SlidingWindow(size=4)},
        {"mask": Full(), "aligned": False, "key_len": 128},
        {"head_dim": 96, "value_dim": 96},
        {"query_len": 63, "key_len": 63},
        {"options": ("sinks", "lse")},
        {"device_kind": "NC_v4"},
        {"device_kind": "trn2"},
        {"device_kind": ""},
        {"batch": 2048},
    ]
    refused = [
        ({"platform": "gpu"}, "requires AWS Trainium (the platform neuron), got gpu"),
        ({"device_kind": "NC_v2"}, "requires Trainium2 or later, got NC_v2"),
        ({"device_kind": "trn1"}, "requires Trainium2 or later, got trn1"),
        ({"dtype": np.dtype(np.float32)}, "multiplies in bfloat16, got float32"),
        ({"dtype": np.dtype(np.float16)}, "multiplies in bfloat16, got float16"),
        ({"head_dim": 192, "value_dim": 192}, "a head_dim of at most 128, got 192"),
        ({"value_dim": 64}, "requires value_dim=128, the head_dim, got 64"),
        ({"partial": True}, "requires all keys to exist"),
        ({"num_heads": 520}, "at most 512 heads per device, got 520"),
        ({"query_len": 131_073, "key_len": 131_073}, "at most 131072 tokens per row, got 131584"),
        ({"query_len": 32, "aligned": False}, "got 32 queries and 2048 keys of different tokens"),
        ({"mask": SlidingWindow(size=4)}, "causal masks, causal windows and documents, not SlidingWindow(size=4)"),
        ({"mask": Causal() | SameSegment()}, "causal masks, causal windows and documents"),
        ({"options": ("softcap", "sinks")}, "does not take softcap"),
        ({"options": ("bias", "dropout")}, "does not take bias and dropout"),
    ]
    elsewhere = "requires AWS Trainium"


def trace(cfg):
    fn, params, state = ax.module.abstract(cfg)
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    jax.eval_shape(lambda params, ids: fn(params, state, ids)[0][0], params, ids)


def half(cfg):
    return cfg.set(dtypes=ax.DTypes(compute=jnp.bfloat16))


def test_missing_library_is_named(stand_in, monkeypatch):
    monkeypatch.setitem(sys.modules, "nkilib.core.attention.attention_cte", None)
    with pytest.raises(ax.ConfigError, match=r"requires nkilib\.core\.attention\.attention_cte .* Install .* 2\.31"):
        trace(half(ax.pipe(tiny_model(), ax.use("nki"))))


@pytest.mark.parametrize(("kind", "cores"), [("NC_v3d", 2), ("NC_v3", 1)])
def test_kernels_run_on_the_physical_cores_of_the_device(stand_in, monkeypatch, kind, cores):
    monkeypatch.setattr("axcore.nn.attention.request.target_device", lambda: ("neuron", kind))
    trace(half(ax.pipe(tiny_model(), ax.use("nki"))))
    assert set(stand_in["attention_cte"].launches) == {cores}


@pytest.mark.long
class TestNki(KernelSuite):
    name = "nki"
    platform = "neuron"
    dtypes = ("bfloat16",)
    lacks = frozenset(
        {"any_mask", "bias", "decoding", "dropout", "head_dim_192", "head_dim_256", "prefix", "softcap", "value_dim"}
    )

    @pytest.fixture(autouse=True)
    def library(self, nkilib, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "neuron")

    def test_eight_devices_agree_with_one(self, monkeypatch):
        def steps(*args):
            run = "__import__('runpy').run_path(path)['steps'](*args)"
            path = str(pathlib.Path(__file__).with_name("eight_devices.py"))
            return on_devices(eval, run, {"path": path, "args": (*args, CrossEntropy.Config(), None)})

        monkeypatch.setattr("axcore.testing.kernel.steps", steps)
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
        self.platform = "cpu"
        super().test_eight_devices_agree_with_one()
