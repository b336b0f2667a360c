"""The cuDNN attention kernel."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import (
    LSE,
    And,
    Attention,
    AttentionInputs,
    AttentionKernel,
    Causal,
    Contiguous,
    Full,
    Heads,
    KernelRequest,
    Mask,
    SameSegment,
    SlidingWindow,
    put_kernel,
)
from axcore_cudnn.fused import attention, attention_backward
from axcore_cudnn.primitives import Form

LARGEST_HEAD_DIM = 256
_BEFORE_HOPPER = ("V100", "T4", "A100", "A800", "A10", "A30", "A40", "L4", "RTX", "GeForce", "TITAN")
"""Substrings of the names of GPUs on which cuDNN supports neither packed rows nor a head_dim above 128."""


class CudnnKernel(AttentionKernel):
    """Fused flash attention by cuDNN, forward and backward, in bfloat16 and float16.

    It supports full attention, causal masks, causal sliding windows, packed rows, sinks and the log-sum-exp. Documents
    of packed rows must be runs of equal segment ids, as in the trainer's batches. The values `heads` and `lse` are
    tagged for remat policies; a policy that saves both avoids rerunning the kernel in the backward pass.
    """

    class Config(AttentionKernel.Config):
        documents: ax.PositiveInt = 8
        """Maximum number of documents per packed row, averaged over the rows of a call, for the fast path. Calls with
        more documents take a slower path with the same result. The backward pass of the fast path requires
        `8 * documents` bytes per element of q. A call has at most 2**26 elements of q, which is 4 GiB by default,
        unless a single row has more."""

    takes = frozenset({"sinks", "lse"})
    tags_heads = True
    uses_dtypes = False

    config: Config

    def supports(self, request: KernelRequest) -> str | None:
        """See `axcore.nn.AttentionKernel`."""
        if request.platform != "gpu":
            return f"requires an NVIDIA GPU, got {request.platform}"
        if request.dtype not in (jnp.bfloat16, jnp.float16):
            return f"computes in bfloat16 or float16, not {request.dtype} (the model's dtypes.compute)"
        return _shapes(request) or _mask(request)

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """See `AttentionKernel`."""
        kv, segment_ids = inputs.plain, self._documents(inputs)
        heads, lse = attention(inputs.q, kv.k, kv.v, self._form(inputs), segment_ids=segment_ids, sinks=inputs.sinks)
        return heads, lse.transpose(0, 2, 1) if inputs.return_lse else None

    def backward(self, inputs: AttentionInputs, heads: Heads, lse: LSE, heads_grad: Heads) -> AttentionInputs:
        """See `AttentionKernel`."""
        kv, segment_ids = inputs.plain, self._documents(inputs)
        dq, dk, dv = attention_backward(
            inputs.q,
            kv.k,
            kv.v,
            heads,
            lse.transpose(0, 2, 1),
            heads_grad.astype(heads.dtype),
            self._form(inputs),
            segment_ids=segment_ids,
        )
        nothing = jax.tree.map(lambda _: None, dataclasses.replace(inputs, kv=kv))
        # The merge computes the gradient of the sinks, which belong to no part of the keys.
        sinks = None if inputs.sinks is None else jnp.zeros_like(inputs.sinks)
        return nothing.replace(q=dq, kv=Contiguous(dk, dv, nothing.plain.tokens), sinks=sinks)

    def _form(self, inputs: AttentionInputs) -> Form:
        arms = _arms(inputs.mask)
        windows = [arm.size for arm in arms if isinstance(arm, SlidingWindow)]
        return Form(
            scale=inputs.scale,
            causal=any(isinstance(arm, Causal) for arm in arms),
            window=min(windows, default=None),
            documents=self.config.documents,
        )

    def _documents(self, inputs: AttentionInputs) -> jax.Array | None:
        return inputs.query.segment_ids if _keeps_apart(inputs.mask) else None


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
    if any(name in request.device_kind for name in _BEFORE_HOPPER):
        if request.packed and _keeps_apart(request.mask):
            return f"requires a Hopper GPU or a later one for packed rows, got {request.device_kind}"
        if head_dim > 128 or value_dim != head_dim:
            return (
                f"requires a Hopper GPU or a later one for head_dim={head_dim}, value_dim={value_dim}, "
                f"got {request.device_kind}"
            )
    if request.partial:
        return "requires all keys to exist, and some do not, as in a KV cache"
    size = request.query_len * request.num_heads * head_dim
    if request.packed and size >= 2**31:
        return f"requires fewer than 2**31 elements of q per packed row, got {size}"
    return None


def _mask(request: KernelRequest) -> str | None:
    """Why the kernel does not support this mask; None if it does."""
    arms = _arms(request.mask)
    known = all(isinstance(arm, SameSegment | Causal | Full | SlidingWindow) for arm in arms)
    causal = any(isinstance(arm, Causal) for arm in arms)
    if not known or (not causal and any(isinstance(arm, SlidingWindow) for arm in arms)):
        return f"supports full attention, causal masks and causal windows, not {request.mask!r}"
    apart = request.packed and _keeps_apart(request.mask)
    if not request.aligned and (causal or apart):
        return (
            f"requires queries and keys of the same tokens for {request.mask!r}, got {request.query_len} queries and "
            f"{request.key_len} keys of different tokens"
        )
    return None


def _keeps_apart(mask: Mask) -> bool:
    return any(isinstance(arm, SameSegment) for arm in _arms(mask))


def _arms(mask: Mask) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, And) else (mask,)
