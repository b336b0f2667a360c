"""The NKI attention kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import Attention, AttentionInputs, FusedKernel, KernelRequest, MaskForm, mask_refusal, put_kernel
from axcore_nki.attention import attention, padded_length
from axcore_nki.calls import LARGEST_BATCH, Form

LARGEST_HEAD_DIM = 128
LARGEST_LENGTH = 131_072
_FIRST_GENERATION = ("trn1", "inf2", "NC_v2")
"""Prefixes of the kinds of device that the kernels do not support."""


class NkiKernel(FusedKernel):
    """Fused flash attention by AWS's NKI library, forward and backward, in bfloat16. It has not run on Trainium yet.

    It supports full attention, causal masks, causal sliding windows, packed rows, sinks and the log-sum-exp. Documents
    of packed rows must be runs of equal segment ids, as in the trainer's batches. The values `heads` and `lse` are
    tagged for remat policies; a policy that saves both avoids rerunning the kernel in the backward pass.
    """

    attention = attention
    takes = frozenset({"sinks", "lse"})

    def supports(self, request: KernelRequest) -> str | None:
        """See `axcore.nn.AttentionKernel`."""
        if request.platform != "neuron":
            return f"requires AWS Trainium (the platform neuron), got {request.platform}"
        if request.device_kind.startswith(_FIRST_GENERATION):
            return f"requires Trainium2 or later, got {request.device_kind}"
        if request.dtype != jnp.bfloat16:
            return f"multiplies in bfloat16, got {request.dtype} (the model's dtypes.compute)"
        return _shapes(request) or mask_refusal(request)

    def form(self, inputs: AttentionInputs) -> Form:
        """See `FusedKernel`."""
        mask = MaskForm.of(inputs.mask)
        assert mask is not None  # see `supports`
        # JAX names a device NC_v3d if it is a logical NeuronCore of two physical ones, and NC_v3 otherwise.
        kind = KernelRequest.of(inputs).device_kind
        cores = 2 if kind.startswith("NC_") and kind.endswith("d") else 1
        return Form(scale=inputs.scale, causal=mask.causal, window=mask.window, cores=cores)

    def operands(self, inputs: AttentionInputs) -> jax.Array | None:
        """The segment ids, if the mask separates documents."""
        mask = MaskForm.of(inputs.mask)
        return inputs.query.segment_ids if mask is not None and mask.documents else None


def use_nki(cfg: ax.Config, where: ax.Where = Attention) -> ax.Config:
    """Fills the kernel slot of every selected attention with NKI attention.

    Args:
        where: selects attentions.
    """
    return put_kernel(cfg, NkiKernel.Config(), where)


def _shapes(request: KernelRequest) -> str | None:
    """Why the kernel does not support these shapes; None if it does."""
    if request.head_dim > LARGEST_HEAD_DIM:
        return f"requires a head_dim of at most {LARGEST_HEAD_DIM}, got {request.head_dim}"
    if request.value_dim != request.head_dim:
        return f"requires value_dim={request.head_dim}, the head_dim, got {request.value_dim}"
    if request.partial:
        return "requires all keys to exist, and some do not, as in a KV cache"
    if request.num_heads > LARGEST_BATCH:
        return f"requires at most {LARGEST_BATCH} heads per device, got {request.num_heads}"
    length = max(padded_length(request.query_len), padded_length(request.key_len))
    if length > LARGEST_LENGTH:
        return f"requires at most {LARGEST_LENGTH} tokens per row, got {length}"
    return None
