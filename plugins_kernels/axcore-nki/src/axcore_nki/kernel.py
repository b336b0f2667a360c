"""The NKI attention kernel."""

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
from axcore_nki.attention import attention, attention_backward, padded_length
from axcore_nki.calls import LARGEST_BATCH, Form

LARGEST_HEAD_DIM = 128
LARGEST_LENGTH = 131_072
_FIRST_GENERATION = ("trn1", "inf2", "NC_v2")
"""Prefixes of the kinds of device that the kernels do not support."""


class NkiKernel(AttentionKernel):
    """Fused flash attention by AWS's NKI library, forward and backward, in bfloat16. It has not run on Trainium yet.

    It supports full attention, causal masks, causal sliding windows, packed rows, sinks and the log-sum-exp. Documents
    of packed rows must be runs of equal segment ids, as in the trainer's batches. The values `heads` and `lse` are
    tagged for remat policies; a policy that saves both avoids rerunning the kernel in the backward pass.
    """

    takes = frozenset({"sinks", "lse"})
    tags_heads = True
    uses_dtypes = False

    def supports(self, request: KernelRequest) -> str | None:
        """See `axcore.nn.AttentionKernel`."""
        if request.platform != "neuron":
            return f"requires AWS Trainium (the platform neuron), got {request.platform}"
        if request.device_kind.startswith(_FIRST_GENERATION):
            return f"requires Trainium2 or later, got {request.device_kind}"
        if request.dtype != jnp.bfloat16:
            return f"multiplies in bfloat16, got {request.dtype} (the model's dtypes.compute)"
        return _shapes(request) or _mask(request)

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """See `AttentionKernel`.

        Raises:
            ConfigError: the NKI library cannot be imported.
        """
        kv, segment_ids = inputs.plain, _documents(inputs)
        heads, lse = attention(inputs.q, kv.k, kv.v, _form(inputs), segment_ids=segment_ids, sinks=inputs.sinks)
        return heads, lse.swapaxes(1, 2) if inputs.return_lse else None

    def backward(self, inputs: AttentionInputs, heads: Heads, lse: LSE, heads_grad: Heads) -> AttentionInputs:
        """See `AttentionKernel`."""
        kv, dtype = inputs.plain, inputs.q.dtype
        dq, dk, dv = attention_backward(
            inputs.q,
            kv.k,
            kv.v,
            heads.astype(dtype),
            lse.swapaxes(1, 2),
            heads_grad.astype(dtype),
            _form(inputs),
            segment_ids=_documents(inputs),
        )
        nothing = jax.tree.map(lambda _: None, dataclasses.replace(inputs, kv=kv))
        return nothing.replace(q=dq, kv=Contiguous(dk, dv, nothing.plain.tokens))


def use_nki(cfg: ax.Config, where: ax.Where = Attention) -> ax.Config:
    """Fills the kernel slot of every selected attention with NKI attention.

    Args:
        where: selects attentions.
    """
    return put_kernel(cfg, NkiKernel.Config(), where)


def _form(inputs: AttentionInputs) -> Form:
    arms = _arms(inputs.mask)
    # JAX names a device NC_v3d if it is a logical NeuronCore of two physical ones, and NC_v3 otherwise.
    kind = KernelRequest.of(inputs).device_kind
    return Form(
        scale=inputs.scale,
        causal=any(isinstance(arm, Causal) for arm in arms),
        window=min((arm.size for arm in arms if isinstance(arm, SlidingWindow)), default=None),
        cores=2 if kind.startswith("NC_") and kind.endswith("d") else 1,
    )


def _documents(inputs: AttentionInputs) -> jax.Array | None:
    return inputs.query.segment_ids if _keeps_apart(inputs.mask) else None


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
