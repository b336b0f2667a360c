"""Attention under any mask of queries and keys, such as that of a KV cache, as one cuDNN call with a bias.

The bias has an element for each query and key of a row, shared by all heads, so it is small for a few queries, and
quadratic for whole rows. Keys after the last one that any query of the row sees are not read.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from axcore_cudnn.primitives import Form, backward, forward

NO_KEY = float(jnp.finfo(jnp.float32).min)
"""The lse of a query that sees no key."""

Visible = Bool[Array, "#batch #seq #kv_seq"]


def masked_forward(
    form: Form, q: Array, k: Array, v: Array, visible: Visible
) -> tuple[Float[Array, "batch seq head value_dim"], Float32[Array, "batch head seq"]]:
    """The heads and the lse. The heads of a query that sees no key are 0, and its lse is `NO_KEY`."""
    seq, visible = q.shape[1], _whole(visible, q, k)
    heads, lse = forward(
        Form(form.scale, causal=False),
        _even(q),
        _even(k),
        _even(v),
        bias=bias_of(_even(_even(visible, 1), 2), q.dtype),
        lengths=_lengths(visible, seq + seq % 2),
    )
    sees = visible.any(2)
    heads = jnp.where(sees[..., None, None], heads[:, :seq], 0)
    return heads, jnp.where(sees[:, None], lse[..., :seq], NO_KEY)


def masked_backward(
    form: Form, q: Array, k: Array, v: Array, heads: Array, lse: Array, heads_grad: Array, visible: Visible
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v. `heads` and `lse` may include keys that are not in `k`."""
    seq, kv_seq, visible = q.shape[1], k.shape[1], _whole(visible, q, k)
    sees = visible.any(2)
    # With a logit near the lowest number and a higher lse, the weights are 0.
    lse = jnp.where(sees[:, None], lse, 0)
    heads_grad = jnp.where(sees[..., None, None], heads_grad, 0)
    dq, dk, dv = backward(
        Form(form.scale, causal=False),
        _even(q),
        _even(k),
        _even(v),
        _even(heads),
        _even(lse, 2),
        _even(heads_grad),
        bias=bias_of(_even(_even(visible, 1), 2), q.dtype),
    )
    return dq[:, :seq], dk[:, :kv_seq], dv[:, :kv_seq]


def bias_of(visible: Bool[Array, "batch seq kv_seq"], dtype: DTypeLike) -> Float[Array, "batch 1 seq kv_seq"]:
    """A bias that hides the keys that a query does not see."""
    hidden = max(-(2.0**41), float(jnp.finfo(dtype).min) / 2)  # finite: inf - inf in the softmax is NaN
    return jnp.where(visible, 0.0, hidden).astype(dtype)[:, None]


def _lengths(
    visible: Bool[Array, "batch seq kv_seq"], seq: int
) -> tuple[Int32[Array, " batch"], Int32[Array, " batch"]]:
    """The numbers of queries and of keys that cuDNN reads: up to the last visible key, and at least one."""
    batch, _, kv_seq = visible.shape
    last = jnp.max(jnp.where(visible.any(1), jnp.arange(1, kv_seq + 1, dtype=jnp.int32), 1), axis=1)
    return jnp.full(batch, seq, jnp.int32), last


def _whole(visible: Visible, q: Array, k: Array) -> Bool[Array, "batch seq kv_seq"]:
    return jnp.broadcast_to(visible, (q.shape[0], q.shape[1], k.shape[1]))


def _even(x: Array, axis: int = 1) -> Array:
    """Pads an axis to an even size: cuDNN requires even numbers of queries and keys with a bias."""
    widths = [(0, size % 2 if at == axis else 0) for at, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if x.shape[axis] % 2 else x
