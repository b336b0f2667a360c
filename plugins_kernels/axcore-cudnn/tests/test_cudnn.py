"""The cuDNN kernel: supported requests, and numerical results if there is a GPU (`JAX_PLATFORMS=cuda`)."""

import dataclasses
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import (
    Attention,
    AttentionInputs,
    Causal,
    Contiguous,
    Full,
    Prefix,
    SameSegment,
    SlidingWindow,
    TokenInfo,
    attend_in_parts,
)
from axcore.testing import KernelSuite, RequestSuite, tiny_model, training_request
from axcore_cudnn import primitives
from axcore_cudnn.kernel import CudnnKernel

KERNEL = CudnnKernel.Config(head_dim=128).build(rngs=ax.Rngs(0))


class TestRequests(RequestSuite):
    name = "cudnn"
    kernel = CudnnKernel.Config(head_dim=128)
    request = training_request("gpu", "NVIDIA H100 80GB HBM3")
    supported = [
        {"packed": False},
        {"mask": Full() & SameSegment()},
        {"mask": Causal() & SlidingWindow(size=4)},
        {"mask": Causal() & SameSegment() & SlidingWindow(size=4)},
        {"mask": Causal()},
        {"mask": Full(), "aligned": False, "key_len": 128},
        {"dtype": np.dtype(np.float16)},
        {"num_kv_heads": 8},
        {"head_dim": 64, "value_dim": 64},
        {"head_dim": 192},
        {"head_dim": 256, "value_dim": 256},
        {"query_len": 63, "key_len": 63},
        {"options": ("sinks", "lse")},
        {"device_kind": "NVIDIA A100-SXM4-80GB", "packed": False},
        {"device_kind": ""},
        {"batch": 2**15},
        {"query_len": 2**20, "key_len": 2**20, "num_heads": 8, "packed": False},
        {"partial": True, "query_len": 1, "aligned": False, "packed": False, "phase": "decode"},
        {"partial": True, "query_len": 512, "key_len": 32_768, "aligned": False, "phase": "prefill"},
        {
            "partial": True,
            "query_len": 1,
            "key_len": 2**20,
            "batch": 2**11,
            "aligned": False,
            "valid_first": True,
            "packed": False,
            "phase": "decode",
        },
        {"query_len": 32, "aligned": False},
        {"mask": SlidingWindow(size=4)},
        {"mask": (Causal() | Prefix(size=4)) & SameSegment()},
        {"mask": Causal() | SameSegment(), "device_kind": "NVIDIA A100-SXM4-80GB"},
    ]
    refused = [
        ({"platform": "tpu"}, "requires an NVIDIA GPU, got tpu"),
        ({"dtype": np.dtype(np.float32)}, "bfloat16 or float16, not float32"),
        ({"head_dim": 100}, "a head_dim that is a multiple of 8 up to 256, got 100"),
        ({"head_dim": 264}, "a head_dim that is a multiple of 8 up to 256, got 264"),
        ({"value_dim": 60}, "a value_dim that is a multiple of 8 up to 256, got 60"),
        ({"value_dim": 256}, "no wider than keys, got value_dim=256 and head_dim=128"),
        ({"device_kind": "NVIDIA A100-SXM4-80GB"}, "for packed rows, got NVIDIA A100-SXM4-80GB"),
        (
            {"device_kind": "NVIDIA A100-SXM4-80GB", "packed": False, "head_dim": 256},
            "for head_dim=256, value_dim=128",
        ),
        ({"query_len": 2**21, "key_len": 2**21}, "per packed row, got 2147483648"),
        (
            {"mask": SlidingWindow(size=4), "query_len": 2**15, "key_len": 2**15},
            "at most 2**30 pairs of queries and keys for SlidingWindow(size=4)",
        ),
        ({"partial": True, "query_len": 2**15, "key_len": 2**16, "batch": 1}, "takes a bias, got 2147483648"),
        (
            {"partial": True, "query_len": 1, "key_len": 2**20, "batch": 2**11, "aligned": False, "packed": False},
            "takes a bias, got 2147483648",
        ),
        ({"options": ("softcap", "sinks")}, "does not take softcap"),
        ({"options": ("bias", "dropout")}, "does not take bias and dropout"),
    ]


def test_documents_of_the_feature_reach_every_attention():
    cfg = ax.pipe(tiny_model(), ax.use("cudnn", documents=4))
    assert all(node.kernel == CudnnKernel.Config(documents=4) for _, node in ax.select(cfg, Attention))


def test_documents_must_be_positive():
    with pytest.raises(ax.ConfigError, match="documents"):
        CudnnKernel.Config(head_dim=64, documents=0).build(rngs=ax.Rngs(0))


def test_unsupported_jax_version_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(MaskType=None))
    with pytest.raises(ImportError, match=r"requires _dot_product_attention_fwd_p in .* Install jax 0\.11\.2"):
        primitives.private("_dot_product_attention_fwd_p", "MaskType")


on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="requires an NVIDIA GPU")


def random_inputs(batch=2, seq=512, heads=8, kv_heads=2, dim=64, segment_ids=None, key_len=None, **more):
    rng = np.random.default_rng(0)
    key_len = key_len or seq
    shapes = [(batch, seq, heads, dim), (batch, key_len, kv_heads, dim), (batch, key_len, kv_heads, dim)]
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    tokens = TokenInfo.of(k[..., 0, 0], segment_ids=segment_ids)
    query = tokens if seq == key_len else TokenInfo.of(q[..., 0, 0])
    return AttentionInputs(q, Contiguous(k, v, tokens), query, scale=dim**-0.5, **more)


def heads_and_gradients(attend, inputs):
    def scalar(q, k, v):
        kv = dataclasses.replace(inputs.plain, k=k, v=v)
        heads = attend(inputs.replace(q=q, kv=kv))
        return (heads.astype(jnp.float32) * jnp.sin(jnp.arange(heads.size).reshape(heads.shape))).sum(), heads

    kv = inputs.plain
    grads, heads = jax.jit(jax.grad(scalar, argnums=(0, 1, 2), has_aux=True))(inputs.q, kv.k, kv.v)
    return [np.asarray(x, np.float64) for x in (heads, *grads)]


@on_gpu
@pytest.mark.parametrize("documents", [2, 16])
def test_changing_one_document_does_not_change_others(documents):
    ids = np.repeat([1, 2, 3, 4, 5], [130, 1, 61, 200, 120])[None].repeat(2, 0)
    kernel = CudnnKernel.Config(head_dim=64, documents=documents).build(rngs=ax.Rngs(0))
    inputs = random_inputs(segment_ids=jnp.asarray(ids), mask=Causal() & SameSegment())
    kv, first = inputs.plain, (ids == 1)[..., None, None]
    q, k, v = (jnp.where(first, 3 * x + 1, x) for x in (inputs.q, kv.k, kv.v))
    changed = inputs.replace(q=q, kv=dataclasses.replace(kv, k=k, v=v))
    one, two = (heads_and_gradients(lambda x: kernel(x)[0], each) for each in (inputs, changed))
    for before, after in zip(one, two, strict=True):
        np.testing.assert_array_equal(before[ids > 1], after[ids > 1])
        assert (before[ids == 1] != after[ids == 1]).any()


@on_gpu
def test_merged_halves_of_the_keys_match_one_call():
    inputs = random_inputs(seq=256, key_len=512, mask=Full())

    def in_halves(inputs):
        kv = inputs.plain
        parts = [jax.tree.map(lambda x, at=at: x[:, at], kv) for at in (slice(256), slice(256, None))]
        with ax.module.root(KERNEL, key=None, training=True):
            return attend_in_parts(KERNEL, inputs, parts)[0]

    whole, halves = heads_and_gradients(lambda x: KERNEL(x)[0], inputs), heads_and_gradients(in_halves, inputs)
    for one, two in zip(whole, halves, strict=True):
        assert np.linalg.norm(one - two) < 5e-3 * np.linalg.norm(one)


@on_gpu
@pytest.mark.parametrize("seq", [64, 192, 704])
def test_very_negative_logits_give_finite_gradients(seq):
    """https://github.com/pytorch/pytorch/issues/196678"""
    inputs = random_inputs(seq=seq, mask=Causal())
    kv = inputs.plain
    shifted = inputs.replace(q=inputs.q + 4, kv=dataclasses.replace(kv, k=kv.k - 4))
    assert all(np.isfinite(x).all() for x in heads_and_gradients(lambda x: KERNEL(x)[0], shifted))


class TestCudnn(KernelSuite):
    """Checks which requests are supported and, on an NVIDIA GPU (`JAX_PLATFORMS=cuda`), numerical results."""

    name = "cudnn"
    platform = "gpu"
    dtypes = ("bfloat16", "float16")
    lacks = frozenset({"bias", "dropout", "softcap"})

    def model(self):
        return ax.select(super().model(), Attention).set(head_dim=16)


class TestCudnnInChunks(TestCudnn):
    """With `documents=1`, most batches take the chunked path."""

    options = {"documents": 1}
