"""Attention on FP8 codes, with a gradient and the scales of its operands."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from axcore_cudnn.fp8_calls import Amaxes, GradientScales, InputScales, Scale, backward, forward
from axcore_fp8.quantize import E4M3, Quantized, amax_of, overflows, quantize, scale_of

Scaling = Literal["current", "delayed"]

HEADS_BOUND = 1.125
"""The heads are weighted means of values, so they exceed the largest value only by the rounding of the weights, which
is at most 1/16."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Histories:
    """The largest absolute values of earlier steps, the latest first; 0 where there was none, or where it was not
    finite. The gradient of each array is its next value.

    Attributes:
        inputs: those of q, k, v and the gradient of the heads, with delayed scaling.
        gradients: those of the gradients of the logits, q, k and v.
        overflow: the number of gradients out of range in the last step, from 0 to 5.
    """

    inputs: Float[Array, "4 length"] | None
    gradients: Float[Array, "4 length"]
    overflow: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Form:
    """The static arguments of a call.

    Attributes:
        scale: multiplies the logits.
        causal: query i sees keys 0 to i.
    """

    scale: float
    causal: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_attention(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head head_dim"],
    histories: Histories,
) -> tuple[Float[Array, "batch seq head head_dim"], Float[Array, ""]]:
    """softmax(scale q k^T) v in E4M3, and the number of arrays out of range among q, k, v and the heads.

    The heads and the lse are tagged for remat policies; with a policy that saves both, the backward pass does not rerun
    the kernel. Scales are powers of two. Those of q, k, v and the gradient of the heads come from their largest values,
    or from `histories.inputs`. The scale of the heads follows from the largest value. Those of the other gradients come
    from `histories.gradients`, because cuDNN finds the largest values while it computes them.
    """
    return _forward(form, q, k, v, histories)[0]


def _forward(form: Form, q: Array, k: Array, v: Array, histories: Histories) -> tuple[tuple[Array, Array], Any]:
    amaxes = [amax_of(x) for x in (q, k, v)]
    given = amaxes if histories.inputs is None else list(histories.inputs[:3].max(1))
    scales = InputScales(*(scale_of(each, E4M3) for each in (*given, HEADS_BOUND * amaxes[2])))
    codes = [quantize(x, E4M3, scale) for x, scale in zip((q, k, v), scales, strict=False)]
    wide_q, wide_k, wide_v = _wide(codes, q.shape[2] // k.shape[2])
    of_heads, lse, amax = forward(form.scale, form.causal, wide_q, wide_k, wide_v, scales)
    heads = Quantized(of_heads, scales.heads).dequantized(q.dtype)
    # The scale is a power of two, so the backward pass gets the same codes from the saved heads.
    flat = checkpoint_name(heads.reshape(*heads.shape[:2], -1), "heads")
    lse = checkpoint_name(lse, "lse")
    overflow = _count((*amaxes, amax), scales)
    like = jnp.zeros((), q.dtype)
    return (flat.reshape(heads.shape), overflow), (codes, scales, flat, lse, amaxes, histories, like)


def _backward(form: Form, kept: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    codes, scales, flat, lse, amaxes, histories, like = kept
    heads_grad = cotangents[0]
    amaxes = [*amaxes, amax_of(heads_grad)]
    of_heads_grad = amaxes[3] if histories.inputs is None else histories.inputs[3].max()
    known, estimated = Amaxes(*histories.gradients.max(1)), _estimates(form, amaxes, heads_grad.shape)
    of_gradients = GradientScales(
        scale_of(of_heads_grad, E4M3),
        *(scale_of(jnp.where(old > 0, old, new), E4M3) for old, new in zip(known, estimated, strict=True)),
    )
    group = heads_grad.shape[2] // codes[1].codes.shape[2]
    q, k, v = _wide(codes, group)
    *grads, found = backward(
        form.scale,
        form.causal,
        q,
        k,
        v,
        quantize(flat.reshape(heads_grad.shape), E4M3, scales.heads).codes,
        lse,
        quantize(heads_grad, E4M3, of_gradients.heads).codes,
        scales,
        of_gradients,
    )
    dq, dk, dv = (
        Quantized(each, scale).dequantized(jnp.float32) for each, scale in zip(grads, of_gradients[2:], strict=True)
    )
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    updated = Histories(
        None if histories.inputs is None else _pushed(histories.inputs, amaxes),
        _pushed(histories.gradients, found),
        _count((amaxes[3], *found), of_gradients),
    )
    return *(x.astype(like.dtype) for x in (dq, dk, dv)), updated


fp8_attention.defvjp(_forward, _backward)


def _wide(codes: list[Quantized], group: int) -> tuple[Array, Array, Array]:
    """The codes, with a kv head for each query head: the gradients of shared kv heads are inaccurate on Hopper."""
    q, k, v = (each.codes for each in codes)
    return (q, jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)) if group > 1 else (q, k, v)


def _estimates(form: Form, amaxes: list[Scale], shape: tuple[int, ...]) -> Amaxes:
    """Largest values of the gradients, for the first step: weights of a query sum to 1, and those of a key to 1 on
    average. Too low an estimate saturates and is counted, too high a one rounds small numbers to 0."""
    of_q, of_k, _, of_heads = amaxes
    of_logits = form.scale * math.sqrt(shape[3]) * of_heads * amaxes[2]
    spread = math.sqrt(shape[1])
    return Amaxes(of_logits, of_logits * of_k, of_logits * of_q * spread, of_heads * spread)


def _pushed(history: Float[Array, "4 length"], amaxes: Any) -> Float[Array, "4 length"]:
    new = jnp.stack(list(amaxes))
    return jnp.roll(history, 1, axis=1).at[:, 0].set(jnp.where(jnp.isfinite(new), new, 0.0))


def _count(amaxes: Any, scales: Any) -> Float[Array, ""]:
    """The number of arrays with numbers that are out of range or not finite."""
    return sum(overflows(*each, E4M3).astype(jnp.float32) for each in zip(amaxes, scales, strict=True))  # type: ignore[return-value]
