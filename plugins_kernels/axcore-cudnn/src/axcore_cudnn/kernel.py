"""Flash attention by cuDNN, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import And, Attention, AttentionKernel, Causal, Everything, Mask, SameSegment, SlidingWindow, TokenInfo


class CudnnKernel(AttentionKernel):
    """softmax(q k^T / sqrt(head_dim)) v, forward and backward fused, without the score matrix in memory.

    It takes causal masks, causal sliding windows, and no mask; rows of one document each; bfloat16 and float16.
    """

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, query: TokenInfo, key: TokenInfo
    ) -> jax.Array:
        """See `axcore.nn.AttentionKernel`.

        Raises:
            ConfigError: a mask, a number type or packed rows that it cannot do.
        """
        if q.dtype not in (jnp.bfloat16, jnp.float16):
            raise ax.ConfigError(
                f"the cudnn kernel computes in bfloat16 or float16, not {q.dtype}; set model.dtypes.compute=bfloat16"
            )
        window, is_causal = _structure(mask, packed=query.segment_ids is not None)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=is_causal, local_window_size=window, implementation="cudnn"
        )


def use_cudnn(cfg: ax.Config, across_documents: bool = False, where: ax.Where = Attention) -> ax.Config:
    """Computes every selected attention with cuDNN.

    Args:
        across_documents: let tokens of packed rows see earlier documents of their row: the mask becomes plainly causal.
            Without it packed rows are refused.
        where: which attentions.
    """
    chosen = ax.select(cfg, where)
    if across_documents:
        return chosen.set(kernel=CudnnKernel.Config(), mask=Causal())
    return chosen.set(kernel=CudnnKernel.Config())


def _structure(mask: Mask, *, packed: bool) -> tuple[tuple[int, int] | None, bool]:
    """A mask as cuDNN understands it: (window to the left and right, causal)."""
    arms = mask.masks if isinstance(mask, And) else (mask,)
    if packed and any(isinstance(arm, SameSegment) for arm in arms):
        raise ax.ConfigError(
            "the cudnn kernel cannot keep packed documents apart; use rows of one document, "
            'use("cudnn", across_documents=True), or another kernel'
        )
    rest = [arm for arm in arms if not isinstance(arm, SameSegment | Causal | Everything | SlidingWindow)]
    windows = [arm.size for arm in arms if isinstance(arm, SlidingWindow)]
    is_causal = any(isinstance(arm, Causal) for arm in arms)
    if rest or (windows and not is_causal):
        raise ax.ConfigError(
            f"the cudnn kernel cannot compute the mask {mask!r}; it takes causal masks and causal windows"
        )
    return (min(windows) - 1, 0) if windows else None, is_causal
