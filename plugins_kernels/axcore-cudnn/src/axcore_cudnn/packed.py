"""Attention for packed rows: exact for any number of documents, with a fast path for few.

Rows of one document each need no packing. If the rows of a call have at most `documents` documents on average, one call
with cuDNN's packed layout computes them (`ragged`). Otherwise several calls do (`chunked`). The choice is made on the
device for each batch. Large batches are processed in groups of rows, because the memory of the backward pass grows with
the rows of a call.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from axcore_cudnn.chunked import chunked_backward, chunked_forward
from axcore_cudnn.primitives import Form, backward, forward
from axcore_cudnn.ragged import ragged_backward, ragged_forward

LARGEST_CALL = 2**26
"""Maximum number of elements of q per call, unless a single row has more: 16,384 tokens with 32 heads of 128."""


def document_numbers(segment_ids: Int[Array, "batch seq"]) -> Int32[Array, "batch seq"]:
    """The document number of each token, counted from 0 through the whole batch, row by row.

    A document is a run of equal segment ids within a row. Padding (segment id 0) is a document too.
    """
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jnp.cumsum(begins.reshape(-1), dtype=jnp.int32).reshape(segment_ids.shape) - 1


def packed_forward(
    form: Form, q: Array, k: Array, v: Array, segment_ids: Int[Array, "batch seq"]
) -> tuple[Float[Array, "batch seq head value_dim"], Float32[Array, "batch head seq"]]:
    """The heads and the lse. Tokens attend within runs of equal segment ids."""

    def some(q: Array, k: Array, v: Array, segment_ids: Array) -> tuple[Array, Array]:
        number, size = document_numbers(segment_ids), _size(form, q)
        if size >= number.size:
            return ragged_forward(form, q, k, v, number, size)

        def whole(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            return forward(form, q, k, v)

        def few(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            return ragged_forward(form, q, k, v, number, size)

        def many(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            return chunked_forward(form, q, k, v, number)

        heads, lse = jax.lax.switch(_case(number, size), (whole, few, many), q, k, v)
        return heads, lse

    if q.shape[1] == 1:
        return forward(form, q, k, v)
    heads, lse = _in_groups_of_rows(some, q, k, v, segment_ids)
    return heads, lse


def packed_backward(
    form: Form, q: Array, k: Array, v: Array, heads: Array, lse: Array, heads_grad: Array, segment_ids: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v. `heads` and `lse` may include keys that are not in `k`."""

    def some(
        q: Array, k: Array, v: Array, heads: Array, lse: Array, heads_grad: Array, segment_ids: Array
    ) -> tuple[Array, Array, Array]:
        number, size = document_numbers(segment_ids), _size(form, q)
        arrays = (q, k, v, heads, lse, heads_grad)
        if size >= number.size:
            return ragged_backward(form, *arrays, number, size)

        def whole(*arrays: Array) -> tuple[Array, Array, Array]:
            return backward(form, *arrays)

        def few(*arrays: Array) -> tuple[Array, Array, Array]:
            q, k, v, heads, lse, heads_grad = arrays
            return ragged_backward(form, q, k, v, heads, lse, heads_grad, number, size)

        def many(*arrays: Array) -> tuple[Array, Array, Array]:
            q, k, v, heads, lse, heads_grad = arrays
            return chunked_backward(form, q, k, v, heads, lse, heads_grad, number)

        dq, dk, dv = jax.lax.switch(_case(number, size), (whole, few, many), *arrays)
        return dq, dk, dv

    if q.shape[1] == 1:
        return backward(form, q, k, v, heads, lse, heads_grad)
    dq, dk, dv = _in_groups_of_rows(some, q, k, v, heads, lse, heads_grad, segment_ids)
    return dq, dk, dv


def _case(number: Int32[Array, "batch seq"], size: int) -> Int32[Array, ""]:
    """0: every row is one document; 1: at most `size` documents; 2: more."""
    documents = number[-1, -1] + 1
    return jnp.where(documents <= number.shape[0], 0, jnp.where(documents <= size, 1, 2))


def _size(form: Form, q: Array) -> int:
    """Size of the document list: a multiple of the rows, and at least two per row, as cuDNN requires."""
    return q.shape[0] * max(2, min(form.documents, q.shape[1]))


def _in_groups_of_rows(fn: Callable[..., tuple[Array, ...]], q: Array, *arrays: Array) -> tuple[Array, ...]:
    """`fn(q, *arrays)` in equal groups of rows with at most `LARGEST_CALL` elements of q each."""
    batch = q.shape[0]
    fits = [rows for rows in range(1, batch + 1) if batch % rows == 0 and rows * q[0].size <= LARGEST_CALL]
    rows = max(fits, default=1)
    if rows == batch:
        return fn(q, *arrays)
    groups = [x.reshape(batch // rows, rows, *x.shape[1:]) for x in (q, *arrays)]
    found = jax.lax.map(lambda group: fn(*group), groups)
    return tuple(x.reshape(batch, *x.shape[2:]) for x in found)
