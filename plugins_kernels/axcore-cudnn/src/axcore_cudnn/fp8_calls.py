"""A single call of cuDNN attention on FP8 codes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from axcore_cudnn.primitives import call, private

_cudnn = private("_dot_product_attention_fp8_fwd_p", "AttentionLayout")

Scale = Float32[Array, ""]
"""Codes times the scale are the numbers."""

PROBABILITY_SCALE = 2.0**-8
"""The scale of the codes of attention weights, which are at most 1: E4M3 numbers go up to 448."""


class Scales(NamedTuple):
    """The scales of the codes of the inputs and of the heads."""

    q: Scale
    k: Scale
    v: Scale
    heads: Scale


@dataclasses.dataclass(frozen=True)
class Form:
    """The static arguments of a call.

    Attributes:
        scale: multiplies the logits.
        causal: query i sees keys 0 to i.
    """

    scale: float
    causal: bool


def forward(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq head head_dim"],
    v: Float[Array, "batch kv_seq head head_dim"],
    scales: Scales,
) -> tuple[Float[Array, "batch seq head head_dim"], Scale]:
    """The codes of the heads, and the largest absolute value of the heads. q, k and v are E4M3 codes."""
    factors = scales.q, scales.k, scales.v, PROBABILITY_SCALE, 1 / PROBABILITY_SCALE, 1 / scales.heads
    heads, _, amax = call(
        _cudnn._dot_product_attention_fp8_fwd_p,
        q,
        k,
        v,
        *(jnp.full((1, 1, 1, 1), factor, jnp.float32) for factor in factors),
        scale=form.scale,
        use_causal_mask=form.causal,
        layout=_cudnn.AttentionLayout.BTNH.value,
        is_training=False,
    )
    return heads, amax.reshape(())
