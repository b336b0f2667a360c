"""What can be said of the cuDNN kernel without a GPU; numerics are compared in benchmarks/step_vs_bare.py."""

import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.nn import Attention, Causal, Everything, SameSegment, SlidingWindow, TokenInfo
from axcore.testing.feature import tiny_model
from axcore_cudnn.kernel import CudnnKernel, _structure


def test_masks_become_what_cudnn_takes():
    assert _structure(Causal() & SameSegment(), packed=False) == (None, True)
    assert _structure(Everything(), packed=False) == (None, False)
    assert _structure(Causal() & SlidingWindow(size=4), packed=False) == ((3, 0), True)


@pytest.mark.parametrize("mask", [SlidingWindow(size=4), Causal() | SameSegment()])
def test_a_mask_that_it_cannot_do_is_refused(mask):
    with pytest.raises(ax.ConfigError, match="cannot compute the mask"):
        _structure(mask, packed=False)


def test_packed_rows_are_refused():
    with pytest.raises(ax.ConfigError, match="packed documents"):
        _structure(Causal() & SameSegment(), packed=True)


def test_float32_is_refused():
    kernel = CudnnKernel.Config(head_dim=8).build(rngs=ax.Rngs(0))
    x = jnp.zeros((1, 4, 2, 8))
    tokens = TokenInfo.of(jnp.zeros((1, 4), jnp.int32))
    with pytest.raises(ax.ConfigError, match="float32"):
        kernel(x, x, x, Causal(), tokens, tokens)


def test_use_sets_every_attention():
    cfg = ax.pipe(tiny_model(), ax.use("cudnn"))
    assert all(isinstance(node.kernel, CudnnKernel.Config) for _, node in ax.select(cfg, Attention))
