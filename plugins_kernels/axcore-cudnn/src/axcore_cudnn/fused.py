"""cuDNN attention with packed rows, sinks and any mask, as a differentiable function of arrays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from axcore.nn import FusedAttention
from axcore_cudnn.decoded import decoded_backward, decoded_forward
from axcore_cudnn.masked import Visible, masked_backward, masked_forward
from axcore_cudnn.packed import packed_backward, packed_forward
from axcore_cudnn.primitives import Form, backward, forward


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What limits the keys of a query besides `Form`; at most one is given.

    Attributes:
        segment_ids: for packed rows. Tokens attend within runs of equal ids. Requires `kv_seq == seq`.
        visible: the keys that each query sees, in place of the mask of `Form`.
        num_keys: the number of keys that the only query of each row sees, which are the first of the row, in place of
            the mask of `Form`.
    """

    segment_ids: Int[Array, "batch seq"] | None = None
    visible: Visible | None = None
    num_keys: Int32[Array, " batch"] | None = None


def forward_pass(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head value_dim"],
    operands: Operands | None = None,
    sinks: Float[Array, " head"] | None = None,
) -> tuple[Float[Array, "batch seq head value_dim"], Float32[Array, "batch head seq"]]:
    """See `axcore.nn.FusedAttention`. q, k and v are bfloat16 or float16."""
    operands = operands or Operands()
    if operands.visible is not None:
        heads, lse = masked_forward(form, q, k, v, operands.visible)
    elif operands.num_keys is not None:
        heads, lse = decoded_forward(form, q, k, v, operands.num_keys)
    elif operands.segment_ids is not None:
        heads, lse = packed_forward(form, q, k, v, operands.segment_ids)
    else:
        heads, lse = forward(form, q, k, v)
    if sinks is None:
        return heads, lse
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
    return (heads * jnp.exp(lse - total).transpose(0, 2, 1)[..., None]).astype(heads.dtype), total


def backward_pass(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head value_dim"],
    operands: Operands | None,
    heads: Float[Array, "batch seq head value_dim"],
    lse: Float32[Array, "batch head seq"],
    heads_grad: Float[Array, "batch seq head value_dim"],
) -> tuple[
    Float[Array, "batch seq head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
    Float[Array, "batch kv_seq kv_head value_dim"],
]:
    """See `axcore.nn.FusedAttention`."""
    operands = operands or Operands()
    if operands.visible is not None:
        return masked_backward(form, q, k, v, heads, lse, heads_grad, operands.visible)
    if operands.num_keys is not None:
        return decoded_backward(form, q, k, v, heads, lse, heads_grad, operands.num_keys)
    if operands.segment_ids is not None:
        return packed_backward(form, q, k, v, heads, lse, heads_grad, operands.segment_ids)
    return backward(form, q, k, v, heads, lse, heads_grad)


attention = FusedAttention(forward_pass, backward_pass)
