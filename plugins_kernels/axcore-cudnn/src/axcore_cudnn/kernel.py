"""The cuDNN attention kernel."""

from __future__ import annotations

import jax.numpy as jnp

import axcore as ax
from axcore.nn import (
    Attention,
    AttentionInputs,
    FusedKernel,
    KernelRequest,
    MaskForm,
    mask_refusal,
    put_kernel,
    visible,
)
from axcore_cudnn.devices import is_before_hopper
from axcore_cudnn.fused import Operands, attention
from axcore_cudnn.primitives import Form

LARGEST_HEAD_DIM = 256
LARGEST_BIAS = 2**30
"""Maximum number of elements of a bias: 2 GiB."""


class CudnnKernel(FusedKernel):
    """Fused flash attention by cuDNN, forward and backward, in bfloat16 and float16.

    It supports full attention, causal masks, causal sliding windows and packed rows without a mask array. Documents of
    packed rows must be runs of equal segment ids, as in the trainer's batches. Other masks, queries and keys of
    different tokens, and keys that may be invalid, as in a KV cache, take a bias with an element for each query and key
    of a row, except that a single query of a row that sees its first keys, as in decoding, takes their number instead.
    It supports sinks and the log-sum-exp. The values `heads` and `lse` are tagged for remat policies; a
    policy that saves both avoids rerunning the kernel in the backward pass.
    """

    class Config(FusedKernel.Config):
        documents: ax.PositiveInt = 8
        """Maximum number of documents per packed row, averaged over the rows of a call, for the fast path. Calls with
        more documents take a slower path with the same result. The backward pass of the fast path requires
        `8 * documents` bytes per element of q. A call has at most 2**26 elements of q, which is 4 GiB by default,
        unless a single row has more."""

    attention = attention
    takes = frozenset({"sinks", "lse"})

    config: Config

    def supports(self, request: KernelRequest) -> str | None:
        """See `axcore.nn.AttentionKernel`."""
        if request.platform != "gpu":
            return f"requires an NVIDIA GPU, got {request.platform}"
        if request.dtype not in (jnp.bfloat16, jnp.float16):
            return f"computes in bfloat16 or float16, not {request.dtype} (the model's dtypes.compute)"
        if reason := _shapes(request):
            return reason
        if _is_decoding(request):
            return None
        return _masked(request) if _needs_bias(request) else _packed(request)

    def form(self, inputs: AttentionInputs) -> Form:
        """See `FusedKernel`."""
        mask = MaskForm.of(inputs.mask) or MaskForm(causal=False, window=None, documents=False)
        return Form(inputs.scale, mask.causal, mask.window, self.config.documents)

    def operands(self, inputs: AttentionInputs) -> Operands:
        """See `FusedKernel`."""
        mask, request = MaskForm.of(inputs.mask), KernelRequest.of(inputs)
        if _is_decoding(request):
            seen = visible(inputs.mask, inputs.query, inputs.keys.tokens)
            seen = jnp.broadcast_to(seen[:, 0], (request.batch, request.key_len))
            return Operands(num_keys=seen.sum(1, dtype=jnp.int32))
        if mask is None or _needs_bias(request):
            return Operands(visible=visible(inputs.mask, inputs.query, inputs.keys.tokens))
        return Operands(segment_ids=inputs.query.segment_ids if mask.documents else None)


def use_cudnn(cfg: ax.Config, documents: int = 8, where: ax.Where = Attention) -> ax.Config:
    """Fills the kernel slot of every selected attention with cuDNN.

    Args:
        documents: see `CudnnKernel.Config`.
        where: selects attentions.
    """
    return put_kernel(cfg, CudnnKernel.Config(documents=documents), where)


def _shapes(request: KernelRequest) -> str | None:
    """Why the kernel does not support these shapes; None if it does."""
    head_dim, value_dim = request.head_dim, request.value_dim
    for name, width in (("head_dim", head_dim), ("value_dim", value_dim)):
        if width % 8 or not 0 < width <= LARGEST_HEAD_DIM:
            return f"requires a {name} that is a multiple of 8 up to {LARGEST_HEAD_DIM}, got {width}"
    if value_dim > head_dim:
        return f"requires values no wider than keys, got value_dim={value_dim} and head_dim={head_dim}"
    if is_before_hopper(request.device_kind) and (head_dim > 128 or value_dim != head_dim):
        return (
            f"requires a Hopper GPU or a later one for head_dim={head_dim}, value_dim={value_dim}, "
            f"got {request.device_kind}"
        )
    return None


def _is_decoding(request: KernelRequest) -> bool:
    """Whether there is one query per row, and the keys that it sees are the first of the row."""
    mask = MaskForm.of(request.mask)
    if mask is None or not request.valid_first or request.query_len != 1:
        return False
    has_window = mask.window is not None and mask.window < request.key_len
    return not has_window and not (mask.documents and request.packed)


def _needs_bias(request: KernelRequest) -> bool:
    """Whether the mask is none that cuDNN computes itself."""
    return request.partial or mask_refusal(request) is not None


def _masked(request: KernelRequest) -> str | None:
    """Why the kernel does not support this call with a bias; None if it does."""
    size = request.batch * request.query_len * request.key_len
    if size <= LARGEST_BIAS:
        return None
    return (
        f"requires at most 2**30 pairs of queries and keys for {request.mask!r} on these tokens, which takes a bias, "
        f"got {size}"
    )


def _packed(request: KernelRequest) -> str | None:
    """Why the kernel does not support packed rows of this size; None if it does."""
    mask = MaskForm.of(request.mask)
    if mask is None or not (request.packed and mask.documents):
        return None
    if is_before_hopper(request.device_kind):
        return f"requires a Hopper GPU or a later one for packed rows, got {request.device_kind}"
    size = request.query_len * request.num_heads * request.head_dim
    if size >= 2**31:
        return f"requires fewer than 2**31 elements of q per packed row, got {size}"
    return None
