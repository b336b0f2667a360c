"""Attention for packed rows against the formula in NumPy float64.

The calls of cuDNN are replaced by the formula in JAX, which returns NaN where cuDNN's result is undefined.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore_cudnn import chunked, fused, packed, ragged
from axcore_cudnn.primitives import Form

from . import cudnn_calls

pytestmark = pytest.mark.long

BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 8, 6


@pytest.fixture(autouse=True)
def formula(monkeypatch):
    for module in (chunked, fused, packed, ragged):
        monkeypatch.setattr(module, "forward", cudnn_calls.forward)
        monkeypatch.setattr(module, "backward", cudnn_calls.backward)
    monkeypatch.setattr(chunked, "CHUNK", 8)


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


@functools.partial(jax.jit, static_argnums=0)
def attend(form, q, k, v, grad, segment_ids, sinks):
    def call(q, k, v, sinks):
        return fused.attention(form, q, k, v, fused.Operands(segment_ids), sinks)

    with jax.default_matmul_precision("float32"):  # the default of GPUs is TF32
        (heads, lse), pull = jax.vjp(call, q, k, v, sinks)
        return heads, lse, *pull((grad, jnp.zeros_like(lse)))


PACKED = {
    "one document in each row": rows([32], [32]),
    "documents across every boundary": rows([3, 6, 10, 13], [15, 2, 15]),
    "documents that end at boundaries": rows([16, 8, 4, 4], [4, 28]),
    "every token": rows([1] * 32, [1] * 31 + [1]),
    "of length 1 at boundaries": rows([15, 1, 1, 15], [7, 1, 1, 6, 1, 1, 15]),
    "odd": rows([5, 1, 25], [31]),
    "two halves only": rows([2, 16], [9, 9]),
    "padding": np.concatenate([rows([5, 12], [10, 7]), np.zeros((2, 15), np.int32)], axis=1),
}


FORMS = {"causal": Form(0.3), "window": Form(0.3, window=5), "full": Form(0.3, causal=False)}
CALLS = [
    pytest.param(name, form, documents, marks=() if form == "window" else pytest.mark.slow)
    for form in FORMS
    for documents in (2, 32)
    for name in PACKED
    if name != "odd"
]


@pytest.mark.parametrize(("name", "form", "documents"), [*CALLS, ("odd", "causal", 2), ("odd", "causal", 8)])
def test_heads_lse_and_gradients_match_the_formula(name, form, documents):
    """Rows with more than `documents` documents on average take the chunked path."""
    form = dataclasses.replace(FORMS[form], documents=documents)
    segment_ids = PACKED[name]
    seq = segment_ids.shape[1]
    rng = np.random.default_rng(0)
    shapes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM), (HEADS, VALUE_DIM)]
    q, k, v, grad = (rng.standard_normal((BATCH, seq, *shape)).astype(np.float32) for shape in shapes)
    sinks = rng.standard_normal(HEADS).astype(np.float32)

    got = attend(form, q, k, v, grad, segment_ids, sinks)
    i, j = np.arange(seq)[:, None], np.arange(seq)[None]
    allowed = segment_ids[:, :, None] == segment_ids[:, None, :]
    if form.causal:
        allowed = allowed & (i >= j) & (i - j < (form.window or seq))
    for have, want in zip(got, reference(q, k, v, grad, allowed, form.scale, sinks), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5)


def test_large_batches_are_processed_in_groups_of_rows(monkeypatch):
    monkeypatch.setattr(packed, "LARGEST_CALL", 32 * HEADS * DIM)
    attend.clear_cache()
    test_heads_lse_and_gradients_match_the_formula("documents across every boundary", "causal", 2)
    attend.clear_cache()


def test_number_of_chunks(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK", 512)
    causal = Form(1.0)
    assert [chunked._chunks(causal, seq) for seq in (511, 512, 1024, 2048, 2050, 8192)] == [1, 1, 2, 4, 1, 16]
    assert chunked._chunks(Form(1.0, window=4), 2048) == chunked._chunks(Form(1.0, causal=False), 2048) == 1


def test_documents_are_listed_in_order():
    ids = np.array([[7, 7, 2, 2, 2, 0, 0], [0, 0, 0, 5, 0, 0, 1]])
    keys = [(row, key, len(list(run))) for row in range(2) for key, run in itertools.groupby(ids[row])]
    lengths = [length for _, _, length in keys]
    number = packed.document_numbers(jnp.asarray(ids))
    np.testing.assert_array_equal(number, np.repeat(np.arange(len(keys)), lengths).reshape(ids.shape))
    documents = ragged.Documents.of(number, 8)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    np.testing.assert_array_equal(documents.offsets, [*starts, ids.size])
    np.testing.assert_array_equal(documents.place, np.concatenate([np.arange(n) for n in lengths]).reshape(ids.shape))
    listed_lengths, listed_offsets = documents.lists(2)
    np.testing.assert_array_equal(listed_lengths.ravel(), [*lengths, 0])
    assert listed_offsets.shape == (2, 5)


EVEN = [(name, pairs) for name, ids in PACKED.items() for pairs in (1, 2) if ids.shape[1] % (2 * pairs) == 0]


@pytest.mark.parametrize(("name", "pairs"), EVEN)
def test_lengths_of_the_document_across_the_middle(name, pairs):
    ids = PACKED[name]
    got = chunked.Halves.of(packed.document_numbers(jnp.asarray(ids)), pairs).lengths
    half = ids.shape[1] // pairs // 2
    want = []
    for row, pair in itertools.product(ids, range(pairs)):
        left, right = row[2 * pair * half :][:half].tolist(), row[(2 * pair + 1) * half :][:half].tolist()
        queries = len(list(itertools.takewhile(left[-1].__eq__, right)))
        keys = len(list(itertools.takewhile(left[-1].__eq__, reversed(left))))
        want.append((queries, keys if queries else 0))
    np.testing.assert_array_equal(np.stack(got, axis=1), want)
