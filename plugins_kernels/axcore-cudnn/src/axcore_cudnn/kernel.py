"""Flash attention by cuDNN, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import (
    And,
    Attention,
    AttentionKernel,
    Causal,
    Everything,
    KernelRequest,
    Mask,
    SameSegment,
    SlidingWindow,
    TokenInfo,
    put_kernel,
)

LARGEST_HEAD_DIM = 128


class CudnnKernel(AttentionKernel):
    """softmax(q k^T / sqrt(head_dim)) v, forward and backward fused, without the score matrix in memory.

    It takes causal masks, causal sliding windows, and no mask; rows of one document each; bfloat16 and float16.
    """

    def supports(self, request: KernelRequest) -> str | None:
        """See `axcore.nn.AttentionKernel`."""
        if request.platform != "gpu":
            return f"it needs an NVIDIA GPU, and this is {request.platform}"
        if request.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 or float16, not {request.dtype} (the model's dtypes.compute)"
        if request.head_dim % 8 or request.head_dim > LARGEST_HEAD_DIM:
            return f"head_dim must be a multiple of 8 up to {LARGEST_HEAD_DIM}, not {request.head_dim}"
        if request.value_dim != request.head_dim:
            return f"keys have {request.head_dim} features and values {request.value_dim}; it needs as many"
        if request.partial or request.query_len != request.key_len:
            return "it attends over the very tokens that ask, not over a KV cache"
        if request.query_len % 2:
            return f"its backward pass needs an even number of tokens in a row, not {request.query_len}"
        arms = _arms(request.mask)
        if request.packed and any(isinstance(arm, SameSegment) for arm in arms):
            return (
                "it cannot keep packed documents apart; use rows of one document, or "
                'use("cudnn", across_documents=True)'
            )
        known = all(isinstance(arm, SameSegment | Causal | Everything | SlidingWindow) for arm in arms)
        is_causal = any(isinstance(arm, Causal) for arm in arms)
        if not known or (not is_causal and any(isinstance(arm, SlidingWindow) for arm in arms)):
            return f"it takes causal masks and causal windows, not {request.mask!r}"
        return None

    def __call__(  # type: ignore[override] # without softcap and sinks: it is never asked for what it does not take
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Mask,
        query: TokenInfo,
        key: TokenInfo,
        *,
        scale: float | None = None,
    ) -> jax.Array:
        """See `axcore.nn.AttentionKernel`."""
        arms = _arms(mask)
        windows = [arm.size for arm in arms if isinstance(arm, SlidingWindow)]
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=any(isinstance(arm, Causal) for arm in arms),
            local_window_size=(min(windows) - 1, 0) if windows else None,
            implementation="cudnn",
        )


def use_cudnn(cfg: ax.Config, across_documents: bool = False, where: ax.Where = Attention) -> ax.Config:
    """Computes every selected attention with cuDNN.

    Args:
        across_documents: let tokens of packed rows see earlier documents of their row: the mask becomes plainly causal.
            Without it packed rows are refused.
        where: which attentions.
    """
    if across_documents:
        cfg = ax.select(cfg, where).set(mask=Causal())
    return put_kernel(cfg, CudnnKernel.Config(), where)


def _arms(mask: Mask) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, And) else (mask,)
