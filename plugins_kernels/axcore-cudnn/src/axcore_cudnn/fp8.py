"""Attention on FP8 codes, without a gradient, and the scales of its operands."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from axcore.config import ConfigError
from axcore_cudnn.fp8_calls import Form, Scales, forward
from axcore_fp8.quantize import E4M3, Quantized, amax_of, overflows, quantize, scale_of

HEADS_BOUND = 1.125
"""The heads are weighted means of values, so they exceed the largest value only by the rounding of the weights, which
is at most 1/16."""

NO_GRADIENT = (
    "computes no gradients: on an H200, cuDNN's FP8 gradients of the values had up to 17 times their size, those of "
    "the queries at most 0.13 times theirs, and both passes took 11.5 ms instead of 8.4 ms in bfloat16 (4,096 "
    "tokens), and 34.2 ms instead of 29.0 ms (16,384 tokens)"
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def fp8_attention(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head head_dim"],
) -> tuple[Float[Array, "batch seq head head_dim"], Float[Array, ""]]:
    """softmax(scale q k^T) v in E4M3, and the number of arrays out of range or not finite among q, k, v and the heads.

    Scales are powers of two, from the largest values of q, k and v. That of the heads follows from the values.

    Raises:
        ConfigError: it is differentiated.
    """
    amaxes = [amax_of(x) for x in (q, k, v)]
    scales = Scales(*(scale_of(each, E4M3) for each in (*amaxes, HEADS_BOUND * amaxes[2])))
    of_q, of_k, of_v = (quantize(x, E4M3, scale).codes for x, scale in zip((q, k, v), scales, strict=False))
    group = q.shape[2] // k.shape[2]
    codes, amax = forward(form, of_q, _repeated(of_k, group), _repeated(of_v, group), scales)
    overflow = sum(
        overflows(each, scale, E4M3).astype(jnp.float32) for each, scale in zip((*amaxes, amax), scales, strict=True)
    )
    return Quantized(codes, scales.heads).dequantized(q.dtype), jnp.asarray(overflow)


@fp8_attention.defjvp
def _refuse(form: Form, primals: Any, tangents: Any) -> Any:
    raise ConfigError(f'FP8 attention {NO_GRADIENT}. Use the kernel "cudnn" in training')


def _repeated(codes: Array, group: int) -> Array:
    """A kv head for each query head."""
    return jnp.repeat(codes, group, axis=2) if group > 1 else codes
