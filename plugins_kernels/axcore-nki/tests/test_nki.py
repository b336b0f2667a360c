"""The NKI kernel: supported requests, and numerical results with the documented contract in place of nkilib.

The kernels have not run on Trainium. See `contract.py` for what stands for them elsewhere.
"""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import (
    Attention,
    Causal,
    Contiguous,
    Full,
    KernelRequest,
    ReferenceKernel,
    SameSegment,
    SlidingWindow,
    refusal,
    use_kernels,
)
from axcore.nn.attention.choice import recording
from axcore.testing import KernelSuite, tiny_model
from axcore.testing.devices import on_devices
from axcore.train import CrossEntropy
from axcore_nki.kernel import NkiKernel

WELL = KernelRequest(
    platform="neuron",
    device_kind="NC_v3d",
    dtype=np.dtype(jnp.bfloat16),
    batch=2,
    query_len=2048,
    key_len=2048,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    value_dim=128,
    scale=0.1,
    mask=Causal() & SameSegment(),
    packed=True,
    partial=False,
    aligned=True,
    phase="train",
    options=(),
    view=Contiguous,
)
KERNEL = NkiKernel.Config(head_dim=128).build(rngs=ax.Rngs(0))


@pytest.mark.parametrize(
    "changes",
    [
        {},
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
    ],
    ids=str,
)
def test_supported_requests(changes):
    assert refusal(KERNEL, dataclasses.replace(WELL, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
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
        ({"mask": SlidingWindow(size=4)}, "causal masks and causal windows"),
        ({"mask": Causal() | SameSegment()}, "causal masks and causal windows"),
        ({"options": ("softcap", "sinks")}, "does not take softcap"),
        ({"options": ("bias", "dropout")}, "does not take bias and dropout"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_unsupported_requests_have_a_reason(changes, reason):
    assert reason in refusal(KERNEL, dataclasses.replace(WELL, **changes))


def trace(cfg):
    fn, params, state = ax.module.abstract(cfg)
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    jax.eval_shape(lambda params, ids: fn(params, state, ids)[0][0], params, ids)


elsewhere = pytest.mark.skipif(jax.default_backend() == "neuron", reason="tests the behaviour on other platforms")


def half(cfg):
    return cfg.set(dtypes=ax.DTypes(compute=jnp.bfloat16))


@elsewhere
def test_nki_alone_raises_on_another_platform():
    cfg = ax.pipe(tiny_model(), ax.use("nki"))
    assert all(node.kernel == NkiKernel.Config() for _, node in ax.select(cfg, Attention))
    with pytest.raises(ax.ConfigError, match=r"decoder\.layers\.\*\.attention\.kernel: .*NkiKernel: .* got"):
        trace(half(cfg))


@elsewhere
def test_next_kernel_of_an_order_is_used_on_another_platform():
    with recording() as found:
        trace(half(use_kernels(tiny_model(), ("nki", "reference"))))
    assert isinstance(found[0].kernel, ReferenceKernel)
    assert [(type(kernel), "requires AWS Trainium" in reason) for kernel, reason in found[0].refused] == [
        (NkiKernel, True)
    ]


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
