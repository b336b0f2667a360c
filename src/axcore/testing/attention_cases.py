"""Attention calls, and their results in NumPy float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

import axcore as ax
from axcore.nn import (
    AttentionInputs,
    Bias,
    Causal,
    Contiguous,
    Dropout,
    Full,
    Mask,
    Prefix,
    SameSegment,
    SlidingWindow,
    TokenInfo,
)

Allowed = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(query index, key index, query segment, key segment), broadcastable -> bool: the mask in NumPy."""

BATCH = 2
DROPOUT = 0.25


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a kernel."""

    needs: tuple[str, ...] = ()
    """The capabilities that the call requires; see `KernelSuite.lacks`."""
    mask: Mask = Causal()
    allowed: Allowed = lambda i, j, s, t: i >= j
    query_len: int = 16
    key_len: int = 16
    start: int = 0
    """Index of the first query in its row."""
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    value_dim: int | None = None
    """Features of a value; None: head_dim."""
    segments: bool = False
    written: int | None = None
    """Number of valid keys; None: all `key_len` keys."""
    behind: int = 0
    """The second row has this many fewer tokens than the first."""
    shift: float = 0.0
    """Added to q and subtracted from k, which makes logits very negative."""
    scale: float = 0.125
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False
    dropout: bool = False


_EVERY: Allowed = lambda i, j, s, t: np.ones((1, 1, 1), bool)  # noqa: E731
_CAUSAL_SEGMENTS: Allowed = lambda i, j, s, t: (i >= j) & (s == t)  # noqa: E731

CASES = {
    "causal": Case(),
    "causal, one document in each row": Case(mask=Causal() & SameSegment()),
    "three blocks of 64": Case(query_len=192, key_len=192, heads=2, kv_heads=2),
    "very negative logits": Case(query_len=192, key_len=192, heads=2, kv_heads=2, shift=4.0),
    "full attention": Case(("full",), mask=Full(), allowed=_EVERY),
    "more keys than queries": Case(("full", "cross"), mask=Full(), allowed=_EVERY, query_len=7, key_len=24, kv_heads=2),
    "more queries than keys": Case(("full", "cross"), mask=Full(), allowed=_EVERY, query_len=24, key_len=8),
    "one query, very negative logits": Case(
        ("full", "cross"), mask=Full(), allowed=_EVERY, query_len=1, key_len=128, heads=2, kv_heads=2, shift=4.0
    ),
    "prefix": Case(("prefix",), mask=Causal() | Prefix(size=5), allowed=lambda i, j, s, t: (i >= j) | (j < 5)),
    "one token": Case(("odd_lengths",), query_len=1, key_len=1),
    "odd length": Case(("odd_lengths",), query_len=37, key_len=37),
    "longer than a block": Case(("long",), query_len=257, key_len=257, heads=2, kv_heads=1),
    "two heads per kv head": Case(("grouped",), kv_heads=2),
    "one kv head": Case(("grouped",), kv_heads=1),
    "eight heads per kv head": Case(("grouped",), heads=8, kv_heads=1),
    "six heads, three kv heads": Case(("grouped",), heads=6, kv_heads=3),
    "head_dim 96": Case(("head_dim_96",), head_dim=96),
    "head_dim 128": Case(("head_dim_128",), head_dim=128),
    "head_dim 192": Case(("head_dim_192",), head_dim=192),
    "head_dim 256": Case(("head_dim_256",), head_dim=256),
    "value_dim 32": Case(("value_dim",), value_dim=32),
    "documents": Case(("segments",), mask=Causal() & SameSegment(), allowed=_CAUSAL_SEGMENTS, segments=True),
    "window": Case(
        ("windows",), mask=Causal() & SlidingWindow(size=5), allowed=lambda i, j, s, t: (i >= j) & (i - j < 5)
    ),
    "window of one": Case(("windows",), mask=Causal() & SlidingWindow(size=1), allowed=lambda i, j, s, t: i == j),
    "window and documents": Case(
        ("windows", "segments"),
        mask=Causal() & SameSegment() & SlidingWindow(size=3),
        allowed=lambda i, j, s, t: (i >= j) & (i - j < 3) & (s == t),
        segments=True,
    ),
    "union of two masks": Case(
        ("any_mask", "segments"),
        mask=Causal() | SameSegment(),
        allowed=lambda i, j, s, t: (i >= j) | (s == t),
        segments=True,
    ),
    "scale": Case(("scale",), scale=0.3),
    "large scale": Case(("scale",), scale=8.0),
    "softcap": Case(("softcap",), softcap=2.0),
    "scale and softcap": Case(("scale", "softcap"), scale=0.3, softcap=2.0),
    "sinks": Case(("sinks",), sinks=True, kv_heads=2),
    "sinks and softcap": Case(("sinks", "softcap"), sinks=True, softcap=3.0),
    "bias": Case(("bias",), bias=True, kv_heads=2),
    "dropout": Case(("dropout",), dropout=True),
    "one decoded token": Case(("decoding",), query_len=1, key_len=12, start=8, written=9),
    "prefill chunk": Case(("decoding",), query_len=3, key_len=12, start=4, written=7, kv_heads=2),
    "rows at different positions": Case(("decoding",), query_len=2, key_len=12, start=7, written=9, behind=4),
    "sinks while decoding": Case(("decoding", "sinks"), query_len=1, key_len=12, start=8, written=9, sinks=True),
    "prefill chunk in a window": Case(
        ("decoding", "windows"),
        mask=Causal() & SlidingWindow(size=4),
        allowed=lambda i, j, s, t: (i >= j) & (i - j < 4),
        query_len=3,
        key_len=12,
        start=4,
        written=7,
    ),
}


class Slopes(ax.Layer):
    """A bias that decreases with the distance of query and key, with a learned slope for each head."""

    class Config(ax.Layer.Config):
        num_heads: ax.PositiveInt = ax.REQUIRED

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        def slopes(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            return jnp.linspace(0.1, 0.5, shape[0], dtype=dtype)

        self.slopes = self.param("slopes", (cfg.num_heads,), slopes, rngs, axes=("head",))

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Float[Array, "batch_or_1 head query key"]:
        """The bias."""
        distance = jnp.abs(query.index[:, :, None] - key.index[:, None, :])
        return -self.slopes[...][:, None, None] * distance[:, None]


Arrays = dict[str, jax.Array]


@functools.cache
def arrays_of(case: Case, dtype: str) -> Arrays:
    """The differentiable inputs: `q`, `k`, `v`, and `sinks` if the case has sinks."""
    random = np.random.default_rng(1)
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    shapes = {
        "q": (BATCH, case.query_len, case.heads, case.head_dim),
        "k": (BATCH, case.key_len, case.kv_heads, case.head_dim),
        "v": (BATCH, case.key_len, case.kv_heads, value_dim),
    }
    shifts = {"q": case.shift, "k": -case.shift, "v": 0.0}
    arrays = {name: jnp.asarray(random.normal(size=shape) + shifts[name], dtype) for name, shape in shapes.items()}
    if case.sinks:
        arrays["sinks"] = jnp.asarray(random.normal(size=case.heads), jnp.float32)
    return arrays


def inputs_of(case: Case, arrays: Arrays, return_lse: bool = False) -> AttentionInputs:
    """The inputs of the kernel."""
    query, key = _tokens(case)
    bias = None
    if case.bias:
        layer = Slopes.Config(num_heads=case.heads).build(rngs=ax.Rngs(0))
        with ax.module.root(layer, key=None, training=False) as frame:
            bias = Bias.of(layer, frame, "bias")
    return AttentionInputs(
        arrays["q"],
        Contiguous(arrays["k"], arrays["v"], key),
        query,
        sinks=arrays.get("sinks"),
        bias=bias,
        dropout=Dropout(jax.random.key(7), None, None, DROPOUT) if case.dropout else None,
        scale=case.scale,
        mask=case.mask,
        softcap=case.softcap,
        return_lse=return_lse,
    )


@dataclasses.dataclass(frozen=True)
class Expected:
    """The float64 results.

    Attributes:
        heads: the heads.
        lse: the log-sum-exp of each query's logits, sinks included.
        grads: input name -> gradient of `(heads * heads_grad).sum()`; empty without `heads_grad`.
        heads_rounding: the error of each element of the heads if each term of its sum, and the sum, has an
            independent relative error of 1. An error of u in each term then gives about u times this number.
        roundings: input name -> the same for its gradient, in the L2 norm over each head.
        arithmetic: relative error of a weight whose logit and sum are computed in float32, divided by the rounding
            error of float32: the largest logit, since an absolute error of a logit is a relative error of its weight,
            and the square root of the number of keys, with which the error of their sum grows.
    """

    heads: Float[np.ndarray, "batch query head value_dim"]
    lse: Float[np.ndarray, "batch query head"]
    grads: dict[str, np.ndarray]
    heads_rounding: Float[np.ndarray, "batch query head value_dim"]
    roundings: dict[str, Float[np.ndarray, " head"]]
    arithmetic: float


def formula(case: Case, arrays: Arrays, heads_grad: np.ndarray | None = None) -> Expected:
    """Attention with all options of the case, and its gradients, in float64."""
    q, k, v = (np.asarray(arrays[name], np.float64) for name in ("q", "k", "v"))
    group = case.heads // case.kv_heads
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    logits = case.scale * np.einsum("bshd,bthd->bhst", q, k)
    slope = np.ones_like(logits)
    if case.softcap is not None:
        capped = np.tanh(logits / case.softcap)
        logits, slope = case.softcap * capped, 1 - capped**2
    if case.bias:
        distance = np.abs(_query_index(case)[:, :, None] - np.arange(case.key_len))
        logits = logits - np.linspace(0.1, 0.5, case.heads)[:, None, None] * distance[:, None]
    arithmetic = float(np.abs(logits).max() + np.sqrt(case.key_len))
    logits = np.where(_allowed(case)[:, None], logits, -np.inf)
    highest = logits.max(-1, keepdims=True)
    total = np.exp(logits - highest).sum(-1, keepdims=True)
    if "sinks" in arrays:
        sinks = np.asarray(arrays["sinks"], np.float64)[:, None, None]
        total = total + np.exp(sinks - highest)
    lse = highest + np.log(total)
    weights, kept = np.exp(logits - lse), np.ones_like(logits)
    if case.dropout:
        dropout = Dropout(jax.random.key(7), None, None, DROPOUT)
        kept = np.asarray(dropout.keep(*_tokens(case), (BATCH, case.heads))) / (1 - DROPOUT)
    heads = np.einsum("bhst,bthd->bshd", weights * kept, v)
    heads_rounding = np.sqrt(np.einsum("bhst,bthd->bshd", (weights * kept) ** 2, v**2) + heads**2)
    grads, roundings = dict[str, np.ndarray](), dict[str, np.ndarray]()
    if heads_grad is not None:
        sink_weights = np.exp(sinks - lse) if "sinks" in arrays else None
        forward = _Forward(q, k, v, weights, kept, slope * case.scale, heads, sink_weights)
        grads, roundings = _gradients(case, forward, heads_grad)
    return Expected(heads, lse[..., 0].transpose(0, 2, 1), grads, heads_rounding, roundings, arithmetic)


class _Forward(NamedTuple):
    """Values of the forward pass; keys and values are repeated for each head.

    Attributes:
        weights: the softmax.
        kept: the factors of dropout.
        slope: the derivative of the logits by the products of queries and keys.
        sink_weights: the softmax weights of the sinks.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    weights: np.ndarray
    kept: np.ndarray
    slope: np.ndarray
    heads: np.ndarray
    sink_weights: np.ndarray | None


def _gradients(
    case: Case, forward: _Forward, heads_grad: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`Expected.grads` and `Expected.roundings`."""
    q, k, v, weights, kept, slope, heads, sink_weights = forward
    of_weights = np.einsum("bshd,bthd->bhst", heads_grad, v) * kept
    along = (heads * heads_grad).sum(-1).transpose(0, 2, 1)[..., None]
    of_logits, of_values = weights * (of_weights - along) * slope, weights * kept
    grads = _products(case, q, k, of_logits, of_values, heads_grad)
    # The difference of `of_weights` and `along` cancels, but their errors do not.
    of_heads = (heads**2 * heads_grad**2).sum(-1).transpose(0, 2, 1)[..., None]
    terms = (weights * slope) ** 2 * (of_weights**2 + of_heads)
    squares = _products(case, q**2, k**2, terms, of_values**2, heads_grad**2)
    if sink_weights is not None:
        grads["sinks"] = -(sink_weights * along).sum((0, 2, 3))
        squares["sinks"] = (sink_weights**2 * of_heads).sum((0, 2, 3))
    return grads, {name: np.sqrt(by_head(each).sum(1)) for name, each in squares.items()}


def by_head(grad: np.ndarray) -> Float[np.ndarray, "head elements"]:
    """The gradient of each head; that of all sinks is one."""
    return grad[None] if grad.ndim == 1 else np.moveaxis(grad, 2, 0).reshape(grad.shape[2], -1)


def _products(
    case: Case, q: np.ndarray, k: np.ndarray, of_logits: np.ndarray, of_values: np.ndarray, heads_grad: np.ndarray
) -> dict[str, np.ndarray]:
    """The matrix products of the backward pass, which give the gradients of q, k and v."""

    def grouped(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], case.kv_heads, -1, x.shape[3]).sum(3)

    return {
        "q": np.einsum("bhst,bthd->bshd", of_logits, k),
        "k": grouped(np.einsum("bhst,bshd->bthd", of_logits, q)),
        "v": grouped(np.einsum("bhst,bshd->bthd", of_values, heads_grad)),
    }


def segments_of(case: Case) -> Int[np.ndarray, "batch key"]:
    """Segment ids of documents of random lengths."""
    starts = np.random.default_rng(3).random((BATCH, case.key_len)) < 0.3
    return np.cumsum(starts, axis=1)


def _query_index(case: Case) -> Int[np.ndarray, "batch query"]:
    """The index of each query."""
    return np.arange(case.query_len) + case.start - np.array([[0], [case.behind]])


def _valid(case: Case) -> Bool[np.ndarray, "batch key"]:
    """True for valid keys."""
    written = case.key_len if case.written is None else case.written
    return np.arange(case.key_len) < written - np.array([[0], [case.behind]])


def _allowed(case: Case) -> Bool[np.ndarray, "batch query key"]:
    """True where the query sees the key."""
    places = _query_index(case)
    segments = segments_of(case) if case.segments else np.zeros((BATCH, case.key_len), int)
    query_segments = np.take_along_axis(segments, np.minimum(places, case.key_len - 1), axis=1)
    allowed = case.allowed(
        places[:, :, None], np.arange(case.key_len)[None, None], query_segments[:, :, None], segments[:, None]
    )
    return np.broadcast_to(allowed & _valid(case)[:, None], (BATCH, case.query_len, case.key_len))


def _tokens(case: Case) -> tuple[TokenInfo, TokenInfo]:
    """The tokens of queries and keys, which are one object if they are the same tokens."""
    index = jnp.arange(case.key_len, dtype=jnp.int32)[None]
    segments, places = segments_of(case), _query_index(case)
    written = None if case.written is None else jnp.asarray(_valid(case))
    key_segments = jnp.asarray(segments, jnp.int32) if case.segments else None
    key = TokenInfo(index, index, key_segments, written, valid_first=written is not None)
    if (case.start, case.behind, case.written, case.query_len) == (0, 0, None, case.key_len):
        return key, key
    query_segments = jnp.asarray(np.take_along_axis(segments, places, axis=1), jnp.int32) if case.segments else None
    place = jnp.asarray(places if case.behind else places[:1], jnp.int32)
    return TokenInfo(place, place, query_segments), key
