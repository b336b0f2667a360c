"""What can be said of the cuDNN kernel without a GPU; with one (`JAX_PLATFORMS=cuda`), its numbers too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import (
    Attention,
    Causal,
    Everything,
    KernelRequest,
    ReferenceKernel,
    SameSegment,
    SlidingWindow,
    on_platform,
    use_kernels,
)
from axcore.nn.kernel_choice import recording
from axcore.nn.kernels import refusal
from axcore.testing import KernelSuite, tiny_model
from axcore_cudnn.kernel import CudnnKernel

WELL = KernelRequest(
    platform="gpu",
    dtype=np.dtype(jnp.bfloat16),
    batch=2,
    query_len=64,
    key_len=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    value_dim=128,
    mask=Causal() & SameSegment(),
    packed=False,
    partial=False,
    options=("scale",),
)
KERNEL = CudnnKernel.Config(head_dim=128).build(rngs=ax.Rngs(0))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": Everything()},
        {"mask": Causal() & SlidingWindow(size=4)},
        {"mask": Causal(), "packed": True},
        {"dtype": np.dtype(np.float16)},
        {"num_kv_heads": 8},
        {"head_dim": 64, "value_dim": 64},
    ],
    ids=str,
)
def test_what_it_can_do(changes):
    assert refusal(KERNEL, dataclasses.replace(WELL, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "tpu"}, "needs an NVIDIA GPU, and this is tpu"),
        ({"dtype": np.dtype(np.float32)}, "bfloat16 or float16, not float32"),
        ({"head_dim": 100, "value_dim": 100}, "multiple of 8 up to 128, not 100"),
        ({"head_dim": 192}, "multiple of 8 up to 128, not 192"),
        ({"value_dim": 64}, "keys have 128 features and values 64"),
        ({"partial": True}, "KV cache"),
        ({"query_len": 63, "key_len": 63}, "an even number of tokens in a row, not 63"),
        ({"query_len": 1}, "KV cache"),
        ({"packed": True}, "packed documents"),
        ({"mask": SlidingWindow(size=4)}, "causal masks and causal windows"),
        ({"mask": Causal() | SameSegment()}, "causal masks and causal windows"),
        ({"options": ("softcap", "sinks")}, "does not take softcap and sinks"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_what_it_cannot_do_has_a_reason(changes, reason):
    assert reason in refusal(KERNEL, dataclasses.replace(WELL, **changes))


def trace(cfg):
    fn, params, state = abstract(cfg)
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    jax.eval_shape(lambda params, ids: fn(params, state, ids)[0][0], params, ids)


def choices(cfg):
    with recording() as found:
        trace(cfg)
    return found


on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what happens on a CPU")


@on_cpu
def test_alone_on_a_cpu_it_is_an_error_with_the_path():
    cfg = ax.pipe(tiny_model(), ax.use("cudnn"))
    assert all(isinstance(node.kernel, CudnnKernel.Config) for _, node in ax.select(cfg, Attention))
    with pytest.raises(
        ax.ConfigError, match=r"decoder\.layers\.\*\.attention\.kernel: CudnnKernel cannot .* this is cpu"
    ):
        trace(cfg)


@on_cpu
def test_in_an_order_the_next_kernel_serves_where_it_cannot():
    cfg = use_kernels(tiny_model(), ("cudnn", "reference")).set(dtypes=ax.DTypes(compute=jnp.bfloat16))
    (choice,) = choices(cfg)
    assert isinstance(choice.kernel, ReferenceKernel)
    assert choice.path == "decoder.layers.*.attention.kernel"
    assert [(type(kernel), "this is cpu" in reason) for kernel, reason in choice.refused] == [(CudnnKernel, True)]
    wide = ax.select(cfg, Attention).set(head_dim=64)
    with on_platform("gpu"):
        (choice,) = choices(wide)
    assert isinstance(choice.kernel, CudnnKernel)


class TestCudnn(KernelSuite):
    """On a machine with an NVIDIA GPU (`JAX_PLATFORMS=cuda`) numbers too; elsewhere what it supports."""

    name = "cudnn"
    platform = "gpu"
    dtypes = ("bfloat16", "float16")
    lacks = frozenset(
        {"any_mask", "decoding", "head_dim_192", "head_dim_256", "long", "odd_lengths", "segments", "sinks", "softcap"}
    )

    def model(self):
        return ax.select(super().model(), Attention).set(head_dim=16)
