"""Attention for packed rows with any number of documents, with cuDNN calls that do not support documents.

A row is split into chunks. Within a chunk, a bias separates the documents. Documents that cross chunk boundaries are
handled by recursive halving: for each pair of neighbouring chunks, then of neighbouring pairs, and so on, the queries
at the start of the right half that continue the last document of the left half attend to all keys of that document in
the left half. This is a rectangle without a mask, and there is at most one per pair. The results are merged by
log-sum-exp. The number of documents is unlimited, memory is linear in the row length, and the work per query is the
length of its document plus at most one chunk.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from axcore_cudnn.masked import bias_of
from axcore_cudnn.primitives import Form, backward, forward

CHUNK = 512
"""Minimum number of tokens per chunk. Rows shorter than two chunks are not split."""


@dataclasses.dataclass(frozen=True)
class Halves:
    """The pairs of halves at one level of the recursion.

    Attributes:
        pairs: number of pairs per row.
        lengths: (number of queries of the right half that continue the last document of the left half, number of keys
            of that document in the left half); both 0 if no document crosses the boundary.
    """

    pairs: int
    lengths: tuple[Int32[Array, " batch*pairs"], Int32[Array, " batch*pairs"]]

    @classmethod
    def of(cls, number: Int32[Array, "batch seq"], pairs: int) -> Halves:
        left, right = _split(number, pairs)
        last = left[:, -1:]
        queries = jnp.sum(right == last, axis=1, dtype=jnp.int32)
        keys = jnp.sum(left == last, axis=1, dtype=jnp.int32)
        return cls(pairs, (queries, jnp.where(queries > 0, keys, 0)))

    def queries(self, x: Array) -> Array:
        """The right halves, in which the queries that attend come first."""
        return _split(x, self.pairs)[1]

    def keys(self, x: Array) -> Array:
        """The left halves, reversed so that the keys of the last document come first. Their order does not matter."""
        return _split(x, self.pairs)[0][:, ::-1]

    def to_queries(self, x: Array, empty: float = 0.0) -> Array:
        """The inverse of `queries`: values of the queries that attend, and `empty` for all other tokens."""
        right = _first(x, self.lengths[0], empty)
        return _join(jnp.full_like(right, empty), right, self.pairs)

    def to_keys(self, x: Array) -> Array:
        """The inverse of `keys`: values of the keys that are attended to, and 0 for all other tokens."""
        left = _first(x, self.lengths[1], 0.0)[:, ::-1]
        return _join(left, jnp.zeros_like(left), self.pairs)


def chunked_forward(
    form: Form, q: Array, k: Array, v: Array, number: Int32[Array, "batch seq"]
) -> tuple[Float[Array, "batch seq head value_dim"], Float32[Array, "batch head seq"]]:
    """The heads and the lse, given the document number of each token. Documents are runs of equal numbers."""
    seq = q.shape[1]
    if seq % 2:
        heads, lse = chunked_forward(form, _even(q), _even(k), _even(v), _even(number, -1))
        return heads[:, :seq], lse[:, :, :seq]
    count = _chunks(form, seq)
    heads, lse = forward(form, *(_rows(x, count) for x in (q, k, v)), bias=_bias(number, count, q.dtype))
    parts = [(_whole(heads, count), _whole(lse.transpose(0, 2, 1), count))]
    for half in _levels(number, count):
        heads, lse = forward(
            Form(form.scale, causal=False), half.queries(q), half.keys(k), half.keys(v), lengths=half.lengths
        )
        parts.append((half.to_queries(heads), half.to_queries(lse.transpose(0, 2, 1), -jnp.inf)))
    if len(parts) == 1:
        return parts[0][0], parts[0][1].transpose(0, 2, 1)
    total = jax.nn.logsumexp(jnp.stack([lse for _, lse in parts]), axis=0)
    merged = sum(heads * jnp.exp(lse - total)[..., None] for heads, lse in parts)
    return jnp.asarray(merged, q.dtype), total.transpose(0, 2, 1)


def chunked_backward(
    form: Form, q: Array, k: Array, v: Array, heads: Array, lse: Array, heads_grad: Array, number: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v. `heads` and `lse` may include keys that are not in `k`."""
    seq = q.shape[1]
    if seq % 2:
        lse = _even(lse.transpose(0, 2, 1)).transpose(0, 2, 1)
        grad, number = _even(heads_grad), _even(number, -1)
        dq, dk, dv = chunked_backward(form, _even(q), _even(k), _even(v), _even(heads), lse, grad, number)
        return dq[:, :seq], dk[:, :seq], dv[:, :seq]
    count = _chunks(form, seq)
    lse = lse.transpose(0, 2, 1)

    def heads_first(x: Array) -> Array:
        return x.transpose(0, 2, 1)

    results = (heads, lse, heads_grad)
    rows = [_rows(x, count) for x in (q, k, v, *results)]
    rows[4] = heads_first(rows[4])
    grads = backward(form, *rows, bias=_bias(number, count, q.dtype))
    sums: list[Any] = [[_whole(x, count)] for x in grads]
    for half in _levels(number, count):
        of_queries = [half.queries(x) for x in results]
        of_queries[1] = heads_first(of_queries[1])
        dq, dk, dv = backward(
            Form(form.scale, causal=False),
            half.queries(q),
            half.keys(k),
            half.keys(v),
            *of_queries,
            lengths=half.lengths,
        )
        for parts, part in zip(sums, (half.to_queries(dq), half.to_keys(dk), half.to_keys(dv)), strict=True):
            parts.append(part)
    dq, dk, dv = (sum(x.astype(jnp.float32) for x in parts).astype(parts[0].dtype) for parts in sums)
    return dq, dk, dv


def _chunks(form: Form, seq: int) -> int:
    """The number of chunks per row, a power of two. It is 1 with a window, since the rectangles would need a mask."""
    count = 1
    while form.causal and form.window is None and seq % (count * 4) == 0 and seq // (count * 2) >= CHUNK:
        count *= 2
    return count


def _levels(number: Array, count: int) -> list[Halves]:
    return [Halves.of(number, 2**level) for level in range(count.bit_length() - 1)]


def _bias(number: Array, count: int, dtype: Any) -> Array:
    number = _rows(number, count)
    return bias_of(number[:, :, None] == number[:, None, :], dtype)


def _even(x: Array, value: int = 0) -> Array:
    """Appends one token, as a separate document: cuDNN requires an even number of tokens with a bias."""
    return jnp.pad(x, [(0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)], constant_values=value)


def _rows(x: Array, count: int) -> Array:
    """[batch, seq, ...] -> [batch * count, seq / count, ...]"""
    return x.reshape(x.shape[0] * count, x.shape[1] // count, *x.shape[2:])


def _whole(x: Array, count: int) -> Array:
    """The inverse of `_rows`."""
    return x.reshape(x.shape[0] // count, x.shape[1] * count, *x.shape[2:])


def _split(x: Array, pairs: int) -> tuple[Array, Array]:
    """[batch, seq, ...] -> the left and the right half of each pair, [batch * pairs, seq / pairs / 2, ...]"""
    x = x.reshape(x.shape[0] * pairs, 2, x.shape[1] // pairs // 2, *x.shape[2:])
    return x[:, 0], x[:, 1]


def _join(left: Array, right: Array, pairs: int) -> Array:
    """The inverse of `_split`."""
    x = jnp.stack([left, right], axis=1)
    return x.reshape(x.shape[0] // pairs, -1, *x.shape[3:])


def _first(x: Array, lengths: Array, other: float) -> Array:
    exists = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(exists.reshape(*exists.shape, *[1] * (x.ndim - 2)), x, other)
