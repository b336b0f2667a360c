"""Attention for packed rows with cuDNN's packed layout: one call that skips pairs of tokens of different documents.

cuDNN takes a list of documents, each with a length and an offset into the tokens of the batch. The list has a static
size. For each entry, the backward pass requires the memory and time of a document as long as a row (4 bytes per head,
feature and token for the gradient of q alone), so the list must be short: see `axcore_cudnn.packed`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from axcore_cudnn.primitives import Form, backward, forward


@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a batch, numbered in the order of the tokens of the flattened batch.

    Attributes:
        number: the document of each token.
        place: the position of each token in its document.
        offsets: the first token of each document in the flattened batch, and the end of the last; unused entries are
            empty documents at the end of the batch.
    """

    number: Int32[Array, "batch seq"]
    place: Int32[Array, "batch seq"]
    offsets: Int32[Array, " size+1"]

    @classmethod
    def of(cls, number: Int32[Array, "batch seq"], size: int) -> Documents:
        """The documents of a batch.

        Args:
            number: the document of each token, in ascending order. Documents numbered `size` or more are left out.
            size: number of entries of the list.
        """
        flat = number.reshape(-1)
        first = jnp.searchsorted(flat, jnp.arange(size + 1, dtype=jnp.int32), method="compare_all").astype(jnp.int32)
        token = jnp.arange(flat.size, dtype=jnp.int32).reshape(number.shape)
        place = token - first.at[number].get(mode="clip")
        return cls(number, place, first)

    def lists(self, batch: int) -> tuple[Array, Array]:
        """Lengths [batch, size / batch] and offsets [batch, size / batch + 1]. cuDNN reads both as flat lists."""
        lengths = self.offsets[1:] - self.offsets[:-1]
        end = jnp.full(batch - 1, self.number.size, jnp.int32)
        return lengths.reshape(batch, -1), jnp.concatenate([self.offsets, end]).reshape(batch, -1)

    def of_tokens(self, rows: Float32[Array, "size head seq"]) -> Float32[Array, "batch head seq"]:
        """Converts values per document to values per row of the batch."""
        heads = jnp.arange(rows.shape[1])[:, None]
        return rows.at[self.number[:, None], heads, self.place[:, None]].get(mode="clip")

    def of_documents(self, lse: Float32[Array, "batch head seq"]) -> Float32[Array, "size head seq"]:
        """The inverse of `of_tokens`. Values beyond the end of a document are those of other tokens."""
        batch, heads, seq = lse.shape
        token = self.offsets[:-1, None] + jnp.arange(seq, dtype=jnp.int32)
        flat = lse.transpose(1, 0, 2).reshape(heads, batch * seq)
        # Indexed element by element, so that consecutive threads of the gather read consecutive tokens.
        return flat.at[jnp.arange(heads)[:, None], token[:, None]].get(mode="clip")


def ragged_forward(
    form: Form, q: Array, k: Array, v: Array, number: Int32[Array, "batch seq"], size: int
) -> tuple[Float[Array, "batch seq head value_dim"], Float32[Array, "batch head seq"]]:
    """The heads and the lse, given the document number of each token. Exact for at most `size` documents in the batch;
    `size` must be a multiple of the batch size, and at least twice the batch size."""
    documents = Documents.of(number, size)
    heads, lse = forward(form, q, k, _as_wide(v, q), documents=documents.lists(q.shape[0]))
    return heads[..., : v.shape[3]], documents.of_tokens(lse)


def ragged_backward(
    form: Form, q: Array, k: Array, v: Array, heads: Array, lse: Array, heads_grad: Array, number: Array, size: int
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v; see `ragged_forward`."""
    documents = Documents.of(number, size)
    wide_v, heads, heads_grad = (_as_wide(x, q) for x in (v, heads, heads_grad))
    lists = documents.lists(q.shape[0])
    dq, dk, dv = backward(form, q, k, wide_v, heads, documents.of_documents(lse), heads_grad, documents=lists)
    return dq, dk, dv[..., : v.shape[3]]


def _as_wide(x: Array, q: Array) -> Array:
    """Pads x with zeros to the width of q. Keys and values share one list of offsets, so their widths must match."""
    return jnp.pad(x, [(0, 0)] * 3 + [(0, q.shape[3] - x.shape[3])])
