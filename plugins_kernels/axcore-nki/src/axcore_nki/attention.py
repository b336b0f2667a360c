"""NKI attention for any length, with packed rows and sinks, as functions of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from axcore.nn import FusedAttention
from axcore_nki import calls
from axcore_nki.calls import KEY_TILE, TILE, Bounds, Form


def forward(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head head_dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    sinks: Float[Array, " head"] | None,
) -> tuple[Float[Array, "batch seq head head_dim"], Float32[Array, "batch head seq"]]:
    """See `axcore.nn.FusedAttention`.

    Args:
        q, k, v: bfloat16.
        segment_ids: given for packed rows. Tokens attend within runs of equal ids. Requires `kv_seq == seq`.
    """
    seq, bounds = q.shape[1], _bounds(form, q, k, segment_ids)
    heads, lse = calls.forward(form, _pad(q), _pad(k), _pad(v), bounds, sinks)
    return heads[:, :seq], lse[..., :seq]


def backward(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head head_dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    heads: Float[Array, "batch seq head head_dim"],
    lse: Float32[Array, "batch head seq"],
    heads_grad: Float[Array, "batch seq head head_dim"],
) -> tuple[
    Float[Array, "batch seq head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
]:
    """See `axcore.nn.FusedAttention`."""
    seq, kv_seq, bounds = q.shape[1], k.shape[1], _bounds(form, q, k, segment_ids)
    more = padded_length(seq) - seq
    # The added queries have no gradient, and so contribute nothing to those of keys and values.
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, more)))
    dq, dk, dv = calls.backward(form, _pad(q), _pad(k), _pad(v), _pad(heads), lse, _pad(heads_grad), bounds)
    return dq[:, :seq], dk[:, :kv_seq], dv[:, :kv_seq]


attention = FusedAttention(forward, backward)


def padded_length(length: int) -> int:
    """The least length that the kernels support: 128, 256 or a multiple of 512."""
    fits = (size for size in (TILE, 2 * TILE) if length <= size)
    return next(fits, -(-length // KEY_TILE) * KEY_TILE)


def _pad(x: Array) -> Array:
    """Pads [batch, seq, ...] with zeros to a length that the kernels support."""
    more = padded_length(x.shape[1]) - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])


def _bounds(form: Form, q: Array, k: Array, segment_ids: Array | None) -> Bounds | None:
    """The keys that each padded query may see; None if causality alone decides. Every query sees some key, so that no
    result is undefined: padding is a document of its own."""
    batch, seq = q.shape[0], padded_length(q.shape[1])
    if segment_ids is not None:
        return _runs(jnp.pad(segment_ids, ((0, 0), (0, seq - q.shape[1])), constant_values=-1))
    if form.causal or padded_length(k.shape[1]) == k.shape[1]:
        return None
    return jnp.zeros((batch, seq), jnp.int32), jnp.full((batch, seq), k.shape[1], jnp.int32)


def _runs(ids: Int[Array, "batch seq"]) -> Bounds:
    """The start and the end of the run of equal ids that each token is in."""
    length = ids.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    differs = ids[:, 1:] != ids[:, :-1]
    begins = jnp.pad(differs, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(differs, ((0, 0), (0, 1)), constant_values=True)
    start = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    return start, jax.lax.cummin(jnp.where(ends, index + 1, length), axis=1, reverse=True)
