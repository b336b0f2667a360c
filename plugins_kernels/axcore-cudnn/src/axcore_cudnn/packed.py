"""Attention of packed rows: exact for any number of documents, and fast for the usual number.

Batches with at most `documents` documents a row on average take one call of cuDNN's packed layout; batches with more
take calls in chunks. The choice is made on the device, batch by batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from axcore_cudnn.chunked import chunked_backward, chunked_forward
from axcore_cudnn.primitives import Form, backward, forward
from axcore_cudnn.ragged import ragged_backward, ragged_forward


def document_numbers(segment_ids: Int[Array, "batch seq"]) -> Int32[Array, "batch seq"]:
    """The number of each token's document in the batch, from 0, rows one after another.

    A document is a run of equal segment ids within a row. Padding, whose segment id is 0, is a run like any other.
    """
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jnp.cumsum(begins.reshape(-1), dtype=jnp.int32).reshape(segment_ids.shape) - 1


def packed_forward(
    form: Form, q: Array, k: Array, v: Array, segment_ids: Int[Array, "batch seq"]
) -> tuple[Float[Array, "batch seq head value_dim"], Float32[Array, "batch head seq"]]:
    """The heads and the lse. Tokens attend within runs of equal segment ids."""
    if q.shape[1] == 1:
        return forward(form, q, k, v)
    number, size = document_numbers(segment_ids), _size(form, q)
    if size >= number.size:
        return ragged_forward(form, q, k, v, number, size)
    return jax.lax.cond(
        number[-1, -1] < size,
        lambda q, k, v, number: ragged_forward(form, q, k, v, number, size),
        lambda q, k, v, number: chunked_forward(form, q, k, v, number),
        q,
        k,
        v,
        number,
    )


def packed_backward(
    form: Form, q: Array, k: Array, v: Array, heads: Array, lse: Array, heads_grad: Array, segment_ids: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, given results that may include other keys."""
    if q.shape[1] == 1:
        return backward(form, q, k, v, heads, lse, heads_grad)
    number, size = document_numbers(segment_ids), _size(form, q)
    if size >= number.size:
        return ragged_backward(form, q, k, v, heads, lse, heads_grad, number, size)

    def few(*arrays: Array) -> tuple[Array, Array, Array]:
        q, k, v, heads, lse, heads_grad, number = arrays
        return ragged_backward(form, q, k, v, heads, lse, heads_grad, number, size)

    def many(*arrays: Array) -> tuple[Array, Array, Array]:
        q, k, v, heads, lse, heads_grad, number = arrays
        return chunked_backward(form, q, k, v, heads, lse, heads_grad, number)

    dq, dk, dv = jax.lax.cond(number[-1, -1] < size, few, many, q, k, v, heads, lse, heads_grad, number)
    return dq, dk, dv


def _size(form: Form, q: Array) -> int:
    """Entries of the list: a multiple of the rows, and two a row at least, or cuDNN does not take it for packed."""
    return q.shape[0] * max(2, min(form.documents, q.shape[1]))
