"""The reference kernel and Attention against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import Attention, Causal, Full, ReferenceKernel, SameSegment, SlidingWindow, TokenInfo

from . import reference
from .support import call, inputs, parameters, wide

BATCH, SEQ, HEADS, HEAD_DIM = 2, 5, 4, 3
SEGMENTS = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]], np.int32)
POSITIONS = np.array([[0, 1, 0, 1, 2], [0, 0, 1, 2, 0]], np.int32)


def rows(seq, offset=0, segments=None):
    index = np.arange(offset, offset + seq, dtype=np.int32)[None]
    return TokenInfo(index, index, segments)


def heads(seed, seq, count, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(BATCH, seq, count, HEAD_DIM)).astype(dtype)


def kernel(q, k, v, mask, query, key):
    cfg = ReferenceKernel.Config(head_dim=HEAD_DIM)
    fn = abstract(cfg)[0]
    (found, lse), _ = jax.jit(fn)({}, {}, inputs(q, k, v, mask, query, key))[0]
    assert lse is None
    return np.asarray(found)


def allowed(rule, seq, kv_seq):
    return np.array([[[rule(b, i, t) for t in range(kv_seq)] for i in range(seq)] for b in range(BATCH)])


MASKS = {
    "everything": (Full(), None, lambda b, i, t: True),
    "causal": (Causal(), None, lambda b, i, t: t <= i),
    "window": (Causal() & SlidingWindow(size=2), None, lambda b, i, t: i - 2 < t <= i),
    "packed": (Causal() & SameSegment(), SEGMENTS, lambda b, i, t: t <= i and SEGMENTS[b, i] == SEGMENTS[b, t]),
    "packed or near": (
        SameSegment() | SlidingWindow(size=2),
        SEGMENTS,
        lambda b, i, t: SEGMENTS[b, i] == SEGMENTS[b, t] or abs(i - t) < 2,
    ),
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids="{} kv heads".format)
@pytest.mark.parametrize("name", MASKS)
def test_the_kernel_is_softmax_attention_under_the_mask(kv_heads, name):
    mask, segments, rule = MASKS[name]
    q, k, v = heads(0, SEQ, HEADS), heads(1, SEQ, kv_heads), heads(2, SEQ, kv_heads)
    info = rows(SEQ, segments=segments)
    expected = reference.attend(*(x.astype(np.float64) for x in (q, k, v)), allowed(rule, SEQ, SEQ))
    np.testing.assert_allclose(kernel(q, k, v, mask, info, info), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_queries_at_the_end_of_longer_keys_see_earlier_keys(kv_heads):
    q, k, v = heads(0, 2, HEADS), heads(1, SEQ, kv_heads), heads(2, SEQ, kv_heads)
    found = kernel(q, k, v, Causal(), rows(2, offset=3), rows(SEQ))
    expected = reference.attend(*(x.astype(np.float64) for x in (q, k, v)), allowed(lambda b, i, t: t <= i + 3, 2, SEQ))
    assert found.shape == (BATCH, 2, HEADS, HEAD_DIM)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_no_key_gets_the_mean_of_all_values():
    q, k, v = heads(0, 1, HEADS), heads(1, SEQ, 2), heads(2, SEQ, 2)
    found = kernel(q, k, v, Causal(), rows(1, offset=-1), rows(SEQ))
    np.testing.assert_allclose(found[:, 0], np.repeat(v.mean(1), 2, axis=1), rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow_or_leak_through_the_mask():
    q, k, v = 100 * heads(0, SEQ, HEADS), 100 * heads(1, SEQ, HEADS), heads(2, SEQ, HEADS)
    found = kernel(q, k, v, Causal(), rows(SEQ), rows(SEQ))
    expected = reference.attend(*(x.astype(np.float64) for x in (q, k, v)), allowed(lambda b, i, t: t <= i, SEQ, SEQ))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_heads_have_the_dtype_of_the_queries():
    q, k, v = (heads(seed, SEQ, HEADS, jnp.bfloat16) for seed in range(3))
    found = kernel(q, k, v, Causal(), rows(SEQ), rows(SEQ))
    assert found.dtype == jnp.bfloat16
    expected = reference.attend(*(x.astype(np.float64) for x in (q, k, v)), allowed(lambda b, i, t: t <= i, SEQ, SEQ))
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, None, None), (4, 2, None), (2, 1, 5)])
def test_attention_projects_attends_and_projects_back(num_heads, num_kv_heads, head_dim):
    cfg = Attention.Config(input_dim=8, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    params = parameters(cfg)
    width, kv = head_dim or 8 // num_heads, num_kv_heads or num_heads
    assert {name: p["weight"].shape for name, p in params.items()} == {
        "query": (8, num_heads * width),
        "key": (8, kv * width),
        "value": (8, kv * width),
        "projection": (num_heads * width, 8),
    }
    x = np.random.default_rng(3).normal(size=(BATCH, SEQ, 8)).astype(np.float32)
    expected = reference.attention(
        x.astype(np.float64), wide(params), num_heads, kv, reference.causal(BATCH, SEQ, SEGMENTS)
    )
    info = rows(SEQ, segments=SEGMENTS)
    np.testing.assert_allclose(call(cfg, params, x, info)[0], expected, rtol=1e-4, atol=1e-5)


class Shift(ax.Layer):
    """A position embedding that adds the positions to queries and keys."""

    class Config(ax.Layer.Config):
        head_dim: int = ax.REQUIRED
        num_heads: int = ax.REQUIRED
        num_kv_heads: int = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        pass

    def __call__(self, q, k, query_positions, key_positions):
        return q + query_positions[:, :, None, None], k - key_positions[:, :, None, None]


class Gate(ax.Layer):
    """An output slot that scales the heads by the mean of the input."""

    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        self.weight = self.param("weight", (cfg.input_dim,), lambda key, s, d: jnp.ones(s, d), rngs, axes=("embed",))

    def __call__(self, x, heads):
        return heads * (x @ self.weight[...])[:, :, None, None]


def test_slots_receive_packed_positions_and_the_attention_input():
    cfg = Attention.Config(
        input_dim=4, num_heads=2, num_kv_heads=1, position=Shift.Config(), output=Gate.Config(), mask=Full()
    )
    params = parameters(cfg)
    assert params["output"]["weight"].shape == (4,)
    x = np.random.default_rng(3).normal(size=(BATCH, SEQ, 4)).astype(np.float32)
    info = TokenInfo(np.arange(SEQ, dtype=np.int32)[None], POSITIONS, SEGMENTS)
    p, wide_x = wide(params), x.astype(np.float64)
    q = (wide_x @ p["query"]["weight"]).reshape(BATCH, SEQ, 2, 2) + POSITIONS[:, :, None, None]
    k = (wide_x @ p["key"]["weight"]).reshape(BATCH, SEQ, 1, 2) - POSITIONS[:, :, None, None]
    v = (wide_x @ p["value"]["weight"]).reshape(BATCH, SEQ, 1, 2)
    out = reference.attend(q, k, v, np.ones((BATCH, SEQ, SEQ), bool))
    out = out * (wide_x @ p["output"]["weight"])[:, :, None, None]
    expected = out.reshape(BATCH, SEQ, 4) @ p["projection"]["weight"]
    np.testing.assert_allclose(call(cfg, params, x, info)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"input_dim": 8, "num_heads": 3, "num_kv_heads": 2}, "num_heads=3 is not a multiple of num_kv_heads=2"),
        ({"input_dim": 8, "num_heads": 3}, "input_dim=8 is not a multiple of num_heads=3"),
        ({"input_dim": 8, "num_heads": 4, "num_kv_heads": 0}, "num_kv_heads"),
        ({"input_dim": 8, "num_heads": 0}, "num_heads"),
        ({"input_dim": 8, "num_heads": 4, "head_dim": 0}, "head_dim"),
    ],
)
def test_invalid_head_counts_raise(options, told):
    with pytest.raises(ax.ConfigError, match=told):
        abstract(Attention.Config(**options))


def test_attention_parameters_have_logical_axes():
    axes = abstract(Attention.Config(input_dim=8, num_heads=4))[0].axes
    assert axes["query"]["weight"] == ("embed", "head")
    assert all(axes[name]["weight"] == ("embed", "kv_head") for name in ("key", "value"))
    assert axes["projection"]["weight"] == ("head", "embed")
