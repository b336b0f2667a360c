"""Attention of one query per row to the first keys of the row, as in decoding: one cuDNN call with lengths, no bias."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from axcore_cudnn.masked import NO_KEY, masked_backward
from axcore_cudnn.primitives import Form, forward


def decoded_forward(
    form: Form, q: Array, k: Array, v: Array, num_keys: Int32[Array, " batch"]
) -> tuple[Float[Array, "batch 1 head value_dim"], Float32[Array, "batch head 1"]]:
    """The heads and the lse. The heads of a row without keys are 0, and its lse is `NO_KEY`."""
    lengths = jnp.ones_like(num_keys), jnp.maximum(num_keys, 1)  # cuDNN reads at least one key
    heads, lse = forward(Form(form.scale, causal=False), q, k, v, lengths=lengths)
    sees = num_keys > 0
    return jnp.where(sees[:, None, None, None], heads, 0), jnp.where(sees[:, None, None], lse, NO_KEY)


def decoded_backward(
    form: Form,
    q: Array,
    k: Array,
    v: Array,
    heads: Array,
    lse: Array,
    heads_grad: Array,
    num_keys: Int32[Array, " batch"],
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, with a bias: with lengths, cuDNN leaves those of later keys undefined."""
    visible = jnp.arange(k.shape[1]) < num_keys[:, None]
    return masked_backward(form, q, k, v, heads, lse, heads_grad, visible[:, None])
