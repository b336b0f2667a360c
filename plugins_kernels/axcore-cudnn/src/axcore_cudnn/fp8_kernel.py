"""The cuDNN attention kernel on FP8 codes."""

from __future__ import annotations

import jax.numpy as jnp

import axcore as ax
from axcore.module import GradientState, Reduce
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
from axcore_cudnn.fp8 import Form, Histories, Scaling, fp8_attention

HEAD_DIM = 128
"""The only head_dim with a backward pass."""
TILE = 128
"""Numbers of queries and keys are multiples of it."""


class CudnnFp8Kernel(AttentionKernel):
    """Fused flash attention by cuDNN on FP8 codes (E4M3), forward and backward, on Hopper GPUs and later ones.

    It supports full attention and causal masks on rows of one document each. q, k, v, the attention weights, the heads
    and all gradients are rounded to E4M3 with one scale each. The values `heads` and `lse` are tagged for remat
    policies; a policy that saves both avoids rerunning the kernel in the backward pass.

    Reports the summary `overflow`: how many of q, k, v and the heads have numbers that are out of range, which
    saturate, or not finite, whose results are NaN. `gradient_overflow` is the same for the gradients, one step later.
    """

    class Config(AttentionKernel.Config):
        layout_fields = ()  # FP8 changes what a run computes
        scaling: Scaling = "current"
        """How the scales of q, k, v and the gradient of the heads are chosen. `current`: from their largest values.
        `delayed`: from their largest values in earlier steps; a new history gives a scale of 1, so the first steps are
        less precise. The scales of the other gradients are always delayed, because cuDNN finds their largest values
        while it rounds them; in the first step, they are estimated."""
        amax_history_len: ax.PositiveInt = 1024
        """Number of steps in the histories of largest values."""

    tags_heads = True
    uses_dtypes = False

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        def state(*shape: int) -> GradientState:
            return GradientState(jnp.zeros(shape, jnp.float32), axes=(None,) * len(shape))

        if cfg.scaling == "delayed":
            self.inputs = state(4, cfg.amax_history_len)
        self.gradients = state(4, cfg.amax_history_len)
        self.gradient_overflow = state()

    def supports(self, request: KernelRequest) -> str | None:
        """See `axcore.nn.AttentionKernel`."""
        if request.platform != "gpu":
            return f"requires an NVIDIA GPU, got {request.platform}"
        if is_before_hopper(request.device_kind):
            return f"requires a Hopper GPU or a later one for FP8 attention, got {request.device_kind}"
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
        of_inputs = self.inputs[...] if self.config.scaling == "delayed" else None
        histories = Histories(of_inputs, self.gradients[...], self.gradient_overflow[...])
        self.add_summary("gradient_overflow", histories.overflow, Reduce.SUM)
        heads, overflow = fp8_attention(Form(inputs.scale, mask.causal), inputs.q, kv.k, kv.v, histories)
        self.add_summary("overflow", overflow, Reduce.SUM)
        return heads, None


def use_cudnn_fp8(
    cfg: ax.Config, scaling: Scaling = "current", amax_history_len: ax.PositiveInt = 1024, where: ax.Where = Attention
) -> ax.Config:
    """Fills the kernel slot of every selected attention with cuDNN attention on FP8 codes.

    Args:
        scaling, amax_history_len: see `CudnnFp8Kernel.Config`.
        where: selects attentions.
    """
    return put_kernel(cfg, CudnnFp8Kernel.Config(scaling=scaling, amax_history_len=amax_history_len), where)
