"""Single calls of AWS's NKI kernels, in their layouts: `attention_cte` forward and `attention_bwd` backward.

The contract is that of nkilib in the Neuron SDK 2.31 and later. In earlier releases, all rows of a call share the
bounds of packed rows. The kernels differ in layouts, defaults and the shapes of bounds, so each argument is passed
explicitly.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from axcore.config import ConfigError

TILE = 128
"""The number of queries per tile. Lengths are multiples of it."""
KEY_TILE = 512
"""The number of keys per tile. Numbers of keys above it are multiples of it."""
LARGEST_BATCH = 512
"""Maximum of rows x heads in a forward call."""

Bounds = tuple[Int32[Array, "batch seq"], Int32[Array, "batch seq"]]
"""The first key that each query sees, and the key after the last."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The static arguments of a call.

    Attributes:
        scale: multiplies the logits.
        causal: query i sees keys 0 to i.
        window: with `causal`: a query sees itself and the `window - 1` keys before it.
        cores: the number of physical NeuronCores of a jax device (the LNC degree).
    """

    scale: float
    causal: bool
    window: int | None
    cores: int


def forward(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head head_dim"],
    bounds: Bounds | None,
    sinks: Float[Array, " head"] | None,
) -> tuple[Float[Array, "batch seq head head_dim"], Float32[Array, "batch head seq"]]:
    """softmax(scale q k^T) v, and the logarithm of the softmax's denominator, sinks included."""
    batch, seq, num_heads, head_dim = q.shape
    rows = LARGEST_BATCH // num_heads
    if batch > rows:
        calls = [slice(start, start + rows) for start in range(0, batch, rows)]
        parts = [
            forward(form, q[at], k[at], v[at], None if bounds is None else (bounds[0][at], bounds[1][at]), sinks)
            for at in calls
        ]
        heads, lse = (jnp.concatenate(each) for each in zip(*parts, strict=True))
        return heads, lse
    named: dict[str, Array] = {}
    if bounds is not None:
        low, high = (jnp.repeat(each.astype(jnp.float32)[..., None], num_heads, axis=0) for each in bounds)
        named |= {"bound_min": low, "bound_max": high}
    if sinks is not None:
        named["sink"] = jnp.tile(sinks.astype(jnp.float32)[:, None], (batch, 1))
    heads, negative_max, reciprocal = _call(
        "attention_cte",
        form.cores,
        (_folded(_features_first(_scaled(q, form.scale))), _folded(_features_first(k)), _folded(v.swapaxes(1, 2))),
        named,
        scale=1.0,  # the kernel supports no other scale for windows and packed rows
        causal_mask=form.causal,
        sliding_window=form.window,
        tp_q=False,
        tp_k=False,
        tp_out=False,
        cache_softmax=True,
    )
    tiles = -(negative_max + jnp.log(reciprocal))
    lse = tiles.swapaxes(1, 2).reshape(batch, num_heads, seq)
    return heads.reshape(batch, num_heads, seq, head_dim).swapaxes(1, 2), lse


def backward(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head head_dim"],
    heads: Float[Array, "batch seq head head_dim"],
    lse: Float32[Array, "batch head seq"],
    heads_grad: Float[Array, "batch seq head head_dim"],
    bounds: Bounds | None,
) -> tuple[
    Float[Array, "batch seq head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
]:
    """Gradients of q, k and v from a given lse, which may include sinks and keys that are not in `k`."""
    batch, seq, num_heads, _ = q.shape
    named: dict[str, Array] = {}
    if bounds is not None:
        low, high = (each.astype(jnp.float32) for each in bounds)
        named |= {"bound_min": low, "bound_max": high}
    tiles = lse.reshape(batch, num_heads, seq // TILE, TILE).swapaxes(2, 3)
    grads = _call(
        "attention_bwd",
        form.cores,
        (*(_features_first(x) for x in (_scaled(q, form.scale), k, v, heads, heads_grad)), tiles),
        named,
        use_causal_mask=form.causal,
        mixed_precision=True,  # keeps the lse and the sums in float32
        softmax_scale=1.0,
        sliding_window=form.window,
    )
    dq, dk, dv = (x.transpose(0, 3, 1, 2) for x in grads)
    return _scaled(dq, form.scale), dk, dv


def _call(name: str, cores: int, arrays: tuple[Array, ...], named: dict[str, Array], **static: Any) -> Any:
    """Calls a kernel, sequentially under `jax.vmap`, for which it has no rule."""
    kernel = _kernel(name)[cores]
    return jax.custom_batching.sequential_vmap(lambda arrays, named: kernel(*arrays, **named, **static))(arrays, named)


def _kernel(name: str) -> Any:  # a kernel of nkilib, which has no type hints
    module = f"nkilib.core.attention.{name}"
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the attention kernel 'nki' requires {module} of AWS's NKI library, which cannot be imported: {error}. "
            f"Install the packages jax-neuronx and neuronx-cc of the AWS Neuron SDK 2.31 or later, or choose another "
            f'kernel: use("kernels", order=("reference",))'
        ) from error


def _features_first(x: Array) -> Array:
    """[batch, seq, head, head_dim] as [batch, head, head_dim, seq]."""
    return x.transpose(0, 2, 3, 1)


def _folded(x: Array) -> Array:
    """[batch, head, ...] as [batch * head, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _scaled(x: Array, scale: float) -> Array:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)
