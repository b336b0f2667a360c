"""The cuDNN attention kernel on FP8 codes."""

from __future__ import annotations

import jax.numpy as jnp

import axcore as ax
from axcore.module import Reduce
from axcore.nn import (
    LSE,
    Attention,
    AttentionInputs,
    AttentionKernel,
    Heads,
    KernelRequest,
    MaskForm,
    mask_refusal,
    put_kernel,
)
from axcore_cudnn.devices import is_before_hopper
from axcore_cudnn.fp8 import NO_GRADIENT, fp8_attention
from axcore_cudnn.fp8_calls import Form

HEAD_DIM = 128
"""The only head_dim that was measured."""
TILE = 128
"""Numbers of queries and keys are multiples of it."""


class CudnnFp8Kernel(AttentionKernel):
    """Fused flash attention by cuDNN on FP8 codes (E4M3), for evaluation, on Hopper GPUs and later ones.

    It supports full attention and causal masks on rows of one document each. q, k, v, the attention weights and the
    heads are rounded to E4M3 with one scale each, from the largest values of the call. It has no gradient.

    Reports the summary `overflow`: how many of q, k, v and the heads have numbers that are out of range, which
    saturate, or not finite, whose results are NaN.
    """

    class Config(AttentionKernel.Config):
        layout_fields = ()  # FP8 changes what a run computes

    uses_dtypes = False

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs  # no parameters

    def supports(self, request: KernelRequest) -> str | None:
        """See `axcore.nn.AttentionKernel`."""
        if request.platform != "gpu":
            return f"requires an NVIDIA GPU, got {request.platform}"
        if is_before_hopper(request.device_kind):
            return f"requires a Hopper GPU or a later one for FP8 attention, got {request.device_kind}"
        if request.training:
            return NO_GRADIENT
        if request.dtype not in (jnp.bfloat16, jnp.float16):
            return f"rounds bfloat16 or float16 to FP8, not {request.dtype} (the model's dtypes.compute)"
        if (request.head_dim, request.value_dim) != (HEAD_DIM, HEAD_DIM):
            return (
                f"requires head_dim={HEAD_DIM} and value_dim={HEAD_DIM}, got {request.head_dim} and {request.value_dim}"
            )
        if request.query_len % TILE or request.key_len % TILE:
            return (
                f"requires numbers of queries and keys that are multiples of {TILE}, got {request.query_len} and "
                f"{request.key_len}"
            )
        if request.partial:
            return "requires all keys to exist, and some do not, as in a KV cache"
        return mask_refusal(request, windows="none", documents="none")

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """See `AttentionKernel`."""
        kv, mask = inputs.plain, MaskForm.of(inputs.mask)
        assert mask is not None  # see `supports`
        heads, overflow = fp8_attention(Form(inputs.scale, mask.causal), inputs.q, kv.k, kv.v)
        self.add_summary("overflow", overflow, Reduce.SUM)
        return heads, None


def use_cudnn_fp8(cfg: ax.Config, where: ax.Where = Attention) -> ax.Config:
    """Fills the kernel slot of every selected attention with cuDNN attention on FP8 codes, for evaluation.

    Args:
        where: selects attentions.
    """
    return put_kernel(cfg, CudnnFp8Kernel.Config(), where)
