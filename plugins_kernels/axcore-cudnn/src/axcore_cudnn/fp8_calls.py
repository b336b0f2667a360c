"""Single calls of cuDNN attention on FP8 codes: forward, and backward."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from axcore_cudnn.primitives import call, private

_cudnn = private("_dot_product_attention_fp8_fwd_p", "_dot_product_attention_fp8_bwd_p", "AttentionLayout")

Scale = Float32[Array, ""]
"""Codes times the scale are the numbers."""

PROBABILITY_SCALE = 2.0**-8
"""The scale of the codes of attention weights, which are at most 1: E4M3 numbers go up to 448."""


class InputScales(NamedTuple):
    """The scales of the codes of the inputs and of the heads."""

    q: Scale
    k: Scale
    v: Scale
    heads: Scale


class GradientScales(NamedTuple):
    """The scales of the codes in the backward pass: of the gradients of the heads, of the logits, of q, k and v."""

    heads: Scale
    logits: Scale
    q: Scale
    k: Scale
    v: Scale


class Amaxes(NamedTuple):
    """The largest absolute values of the gradients of the logits, and of q, k and v."""

    logits: Scale
    q: Scale
    k: Scale
    v: Scale


def forward(
    scale: float,
    causal: bool,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq head head_dim"],
    v: Float[Array, "batch kv_seq head head_dim"],
    scales: InputScales,
) -> tuple[Float[Array, "batch seq head head_dim"], Float32[Array, "batch head seq"], Scale]:
    """The codes of the heads, the lse, and the largest absolute value of the heads.

    Args:
        scale: multiplies the logits.
        causal: query i sees keys 0 to i.
        q, k, v: E4M3 codes.
    """
    operands = _shaped(scales.q, scales.k, scales.v, PROBABILITY_SCALE, 1 / PROBABILITY_SCALE, 1 / scales.heads)
    heads, _, amax, lse = call(
        _cudnn._dot_product_attention_fp8_fwd_p,
        q,
        k,
        v,
        *operands,
        scale=scale,
        use_causal_mask=causal,
        layout=_cudnn.AttentionLayout.BTNH.value,
        is_training=True,
    )
    return heads, lse, amax.reshape(())


def backward(
    scale: float,
    causal: bool,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq head head_dim"],
    v: Float[Array, "batch kv_seq head head_dim"],
    heads: Float[Array, "batch seq head head_dim"],
    lse: Float32[Array, "batch head seq"],
    heads_grad: Float[Array, "batch seq head head_dim"],
    scales: InputScales,
    of_gradients: GradientScales,
) -> tuple[
    Float[Array, "batch seq head head_dim"],
    Float[Array, "batch kv_seq head head_dim"],
    Float[Array, "batch kv_seq head head_dim"],
    Amaxes,
]:
    """The codes of the gradients of q, k and v, and largest absolute values. All arrays but the lse are E4M3 codes."""
    made = of_gradients
    operands = _shaped(
        *scales,
        made.heads,
        PROBABILITY_SCALE,
        made.logits,
        1 / PROBABILITY_SCALE,
        *(1 / each for each in (made.q, made.k, made.v, made.logits)),
    )
    dq, dk, dv, *amaxes = call(
        _cudnn._dot_product_attention_fp8_bwd_p,
        q,
        k,
        v,
        heads,
        heads_grad,
        lse,
        *operands,
        scale=scale,
        use_causal_mask=causal,
        layout=_cudnn.AttentionLayout.BTNH.value,
    )
    of_q, of_k, of_v, of_logits = (each.reshape(()) for each in amaxes)
    return dq, dk, dv, Amaxes(of_logits, of_q, of_k, of_v)


def _shaped(*factors: Scale | float) -> list[Float32[Array, "1 1 1 1"]]:
    return [jnp.full((1, 1, 1, 1), factor, jnp.float32) for factor in factors]
