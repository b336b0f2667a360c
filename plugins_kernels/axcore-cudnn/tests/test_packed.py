"""Attention of packed rows, assembled from calls that know no documents, against the formula in NumPy float64.

Off the GPU the calls of cuDNN are replaced by the formula in JAX, which puts NaN where cuDNN defines no result.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore_cudnn import fused, packed
from axcore_cudnn.primitives import Form

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 8, 6


def logits_of(form, q, k, bias, lengths):
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = form.scale * jnp.einsum("bthd,bshd->bhts", q, k)
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    allowed = jnp.ones((1, 1, *logits.shape[2:]), bool)
    if form.causal:
        allowed &= i >= j
    if form.window is not None:
        allowed &= i - j < form.window
    if lengths is not None:
        allowed &= (i < lengths[0][:, None, None, None]) & (j < lengths[1][:, None, None, None])
    if bias is not None:
        logits = logits + bias
    return jnp.where(allowed, logits, -jnp.inf)


def undefined(x, length):
    missing = jnp.arange(x.shape[1]) >= length[:, None]
    return jnp.where(missing.reshape(*missing.shape, *[1] * (x.ndim - 2)), jnp.nan, x)


def forward(form, q, k, v, *, bias=None, lengths=None):
    logits = logits_of(form, q, k, bias, lengths)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    heads = jnp.einsum("bhts,bshd->bthd", weights, jnp.repeat(v, q.shape[2] // v.shape[2], axis=2))
    if lengths is None:
        return heads, lse
    return undefined(heads, lengths[0]), undefined(lse.swapaxes(1, 2), lengths[0]).swapaxes(1, 2)


def backward(form, q, k, v, heads, lse, heads_grad, *, bias=None, lengths=None):
    group = q.shape[2] // k.shape[2]
    weights = jnp.exp(logits_of(form, q, k, bias, lengths) - lse[..., None])
    d_weights = jnp.einsum("bthd,bshd->bhts", heads_grad, jnp.repeat(v, group, axis=2))
    delta = jnp.sum(heads * heads_grad, axis=-1).swapaxes(1, 2)
    d_logits = form.scale * weights * (d_weights - delta[..., None])
    dq = jnp.einsum("bhts,bshd->bthd", d_logits, jnp.repeat(k, group, axis=2))
    dk, dv = jnp.einsum("bhts,bthd->bshd", d_logits, q), jnp.einsum("bhts,bthd->bshd", weights, heads_grad)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    if lengths is None:
        return dq, dk, dv
    return undefined(dq, lengths[0]), undefined(dk, lengths[1]), undefined(dv, lengths[1])


@pytest.fixture(autouse=True)
def formula(monkeypatch):
    for module in (packed, fused):
        monkeypatch.setattr(module, "forward", forward)
        monkeypatch.setattr(module, "backward", backward)
    monkeypatch.setattr(packed, "CHUNK", 4)


def reference(q, k, v, grad, allowed, scale, sinks):
    """NumPy float64: heads, lse, dq, dk, dv, and the gradient of the sinks."""
    q, k, v, grad, sinks = (np.asarray(x, np.float64) for x in (q, k, v, grad, sinks))
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, group, axis=2) for x in (k, v))
    logits = np.where(allowed[:, None], scale * np.einsum("bthd,bshd->bhts", q, wide_k), -np.inf)
    sink = np.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
    lse = np.log(np.exp(logits).sum(-1, keepdims=True) + np.exp(sink))
    weights = np.exp(logits - lse)
    heads = np.einsum("bhts,bshd->bthd", weights, wide_v)
    delta = np.einsum("bthd,bthd->bht", heads, grad)[..., None]
    d_logits = weights * (np.einsum("bthd,bshd->bhts", grad, wide_v) - delta)
    dq = scale * np.einsum("bhts,bshd->bthd", d_logits, wide_k)
    dk = scale * np.einsum("bhts,bthd->bshd", d_logits, q)
    dv = np.einsum("bhts,bthd->bshd", weights, grad)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    return heads, lse[..., 0], dq, dk, dv, -(np.exp(sink - lse) * delta).sum((0, 2, 3))


def rows(*lengths_of_rows):
    return np.stack(
        [np.repeat(np.arange(1, len(lengths) + 1), lengths) for lengths in lengths_of_rows],
    ).astype(np.int32)


PACKED = {
    "one document a row": rows([32], [32]),
    "documents across every boundary": rows([3, 6, 10, 13], [15, 2, 15]),
    "documents that end at boundaries": rows([16, 8, 4, 4], [4, 28]),
    "every token": rows([1] * 32, [1] * 31 + [1]),
    "of length 1 at boundaries": rows([15, 1, 1, 15], [7, 1, 1, 6, 1, 1, 15]),
    "odd": rows([5, 1, 25], [31]),
    "two halves only": rows([2, 16], [9, 9]),
    "padding": np.concatenate([rows([5, 12], [10, 7]), np.zeros((2, 15), np.int32)], axis=1),
}


@pytest.mark.parametrize("form", [Form(0.3), Form(0.3, window=5), Form(0.3, causal=False)], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_heads_lse_and_gradients_equal_the_formula(name, form):
    segment_ids = PACKED[name]
    seq = segment_ids.shape[1]
    rng = np.random.default_rng(0)
    shapes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM), (HEADS, VALUE_DIM)]
    q, k, v, grad = (rng.standard_normal((BATCH, seq, *shape)).astype(np.float32) for shape in shapes)
    sinks = rng.standard_normal(HEADS).astype(np.float32)

    def attend(q, k, v, sinks):
        return fused.attention(q, k, v, form, segment_ids=jnp.asarray(segment_ids), sinks=sinks)

    (heads, lse), pull = jax.vjp(attend, q, k, v, sinks)
    got = heads, lse, *pull((jnp.asarray(grad), jnp.zeros_like(lse)))
    i, j = np.arange(seq)[:, None], np.arange(seq)[None]
    allowed = segment_ids[:, :, None] == segment_ids[:, None, :]
    if form.causal:
        allowed = allowed & (i >= j) & (i - j < (form.window or seq))
    for have, want in zip(got, reference(q, k, v, grad, allowed, form.scale, sinks), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5)


def test_rows_are_cut_into_chunks_where_that_is_possible(monkeypatch):
    monkeypatch.setattr(packed, "CHUNK", 512)
    causal = Form(1.0)
    assert [packed._chunks(causal, seq) for seq in (511, 512, 1024, 2048, 2050, 8192)] == [1, 1, 2, 4, 1, 16]
    assert packed._chunks(Form(1.0, window=4), 2048) == packed._chunks(Form(1.0, causal=False), 2048) == 1


def test_runs_are_numbered_in_order():
    ids = np.array([[7, 7, 2, 2, 2, 0, 0], [0, 0, 0, 5, 0, 0, 1]])
    want = [[key for key, (_, run) in enumerate(itertools.groupby(row)) for _ in run] for row in ids]
    np.testing.assert_array_equal(packed.runs(jnp.asarray(ids)), want)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("pairs", [1, 2])
def test_lengths_of_the_document_that_crosses_the_middle(name, pairs):
    ids = PACKED[name]
    if ids.shape[1] % (2 * pairs):
        pytest.skip(f"{ids.shape[1]} tokens are not halves of {pairs} pairs")
    got = packed.Halves.of(packed.runs(jnp.asarray(ids)), pairs).lengths
    half = ids.shape[1] // pairs // 2
    want = []
    for row, pair in itertools.product(ids, range(pairs)):
        left, right = row[2 * pair * half :][:half].tolist(), row[(2 * pair + 1) * half :][:half].tolist()
        queries = len(list(itertools.takewhile(lambda x: x == left[-1], right)))
        keys = len(list(itertools.takewhile(lambda x: x == left[-1], reversed(left))))
        want.append((queries, keys if queries else 0))
    np.testing.assert_array_equal(np.stack(got, axis=1), want)
