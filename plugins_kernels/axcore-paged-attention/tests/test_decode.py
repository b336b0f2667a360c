"""The kernel on pages, with several blocks and parts, against NumPy float64 in the Pallas interpreter."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.nn.kv.codes import encoded
from axcore_paged_attention import decode
from axcore_paged_attention.decode import Form, Pool, decode_attention

WIDTH = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.5e-2}
"""Largest absolute error of heads, whose values are about 1."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call with rows of different lengths."""

    lengths: tuple[int, ...] = (37, 5, 0)
    queries: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 32
    page_size: int = 4
    dtype: str = "float32"
    codes: str | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: int = 1
    block: int = 16
    dot_rows: int = 2

    @property
    def form(self) -> Form:
        scale = self.head_dim**-0.5
        return Form(scale, self.softcap, self.block, self.splits, self.dot_rows, interpret=True)


def arrays(call: Call) -> tuple[jax.Array, Pool, np.ndarray, jax.Array | None]:
    """q, the second of two layers of a pool, the mask, and sinks. What no query sees is NaN, and pages after the last
    are out of range."""
    rng, batch, per_row = np.random.default_rng(0), len(call.lengths), -(-max(call.lengths) // call.page_size) + 1
    key = np.arange(per_row * call.page_size)
    place = np.asarray(call.lengths)[:, None] - call.queries + np.arange(call.queries)
    allowed = key <= place[:, :, None]
    if call.window is not None:
        allowed &= place[:, :, None] - key < call.window
    pages = rng.permutation(batch * per_row).reshape(batch, per_row)
    # What is beyond the end of a row, or entirely before its window, has no page.
    used = allowed.any(1).reshape(batch, per_row, call.page_size).any(2)
    seen = np.zeros((batch * per_row, call.page_size), bool)
    seen[pages] = allowed.any(1).reshape(batch, per_row, call.page_size)

    def pool(dim: int) -> tuple[jax.Array, jax.Array | None]:
        x = jnp.asarray(rng.normal(size=(batch * per_row, call.page_size, call.kv_heads, dim)), call.dtype)
        hidden = ~seen[..., None, None]
        if call.codes is None:
            x = jnp.where(hidden, jnp.nan, x)
            return jnp.stack([jnp.full_like(x, jnp.nan), x]), None
        codes, scale = encoded(x, call.codes)
        scale = jnp.where(hidden[..., 0], jnp.nan, scale)
        return jnp.stack([codes, codes]), jnp.stack([jnp.full_like(scale, jnp.nan), scale])

    (k, k_scale), (v, v_scale) = pool(call.head_dim), pool(call.value_dim)
    q = jnp.asarray(rng.normal(size=(batch, call.queries, call.heads, call.head_dim)), call.dtype)
    scales = None if k_scale is None or v_scale is None else (k_scale, v_scale)
    table = jnp.asarray(np.where(used, pages, 10**6), jnp.int32)
    sinks = jnp.asarray(rng.normal(size=call.heads), jnp.float32) if call.sinks else None
    return q, Pool(k, v, scales, jnp.ones(1, jnp.int32), table), allowed, sinks


def expected(
    call: Call, q: jax.Array, pool: Pool, allowed: np.ndarray, sinks: jax.Array | None
) -> tuple[np.ndarray, np.ndarray]:
    """The heads and the log-sum-exp of attention to the decoded keys."""
    table = np.minimum(np.asarray(pool.table), pool.k.shape[1] - 1)

    def read(x: jax.Array, scale: jax.Array | None) -> np.ndarray:
        found = np.asarray(x[1].astype(jnp.float32), np.float64)
        found = found if scale is None else found * np.asarray(scale[1], np.float64)[..., None]
        found = found[table].reshape(len(table), -1, *found.shape[2:])
        found = np.where(allowed.any(1)[..., None, None], found, 0)
        return np.repeat(found, call.heads // call.kv_heads, axis=2)

    k_scale, v_scale = pool.scales or (None, None)
    logits = np.einsum("bqhd,bkhd->bqhk", np.asarray(q, np.float64), read(pool.k, k_scale)) * call.form.scale
    if call.softcap is not None:
        logits = call.softcap * np.tanh(logits / call.softcap)
    weights = np.where(allowed[:, :, None], np.exp(logits), 0)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64)))
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    weights = weights / np.where(total == 0, 1, total)[..., None]
    return np.einsum("bqhk,bkhd->bqhd", weights, read(pool.v, v_scale)), lse


def check(call: Call) -> None:
    q, pool, allowed, sinks = arrays(call)
    run = jax.jit(functools.partial(decode_attention, call.form))
    heads, lse = run(q, pool, jnp.asarray(allowed), sinks)
    right, right_lse = expected(call, q, pool, allowed, sinks)
    assert (heads.dtype, lse.dtype) == (jnp.dtype(call.dtype), jnp.float32)
    np.testing.assert_allclose(np.asarray(heads, np.float64), right, rtol=0, atol=WIDTH[call.dtype])
    empty = np.isinf(right_lse)
    np.testing.assert_allclose(np.asarray(lse)[~empty], right_lse[~empty], rtol=0, atol=5e-6)
    assert (np.asarray(lse)[empty] < -1e30).all()


CALLS = [
    Call(),
    Call(splits=2),
    Call(splits=5, lengths=(100, 17, 1)),
    Call(dot_rows=1, splits=2),
    Call(queries=3, heads=4, splits=2, lengths=(37, 5, 3)),
    Call(queries=8, heads=12, kv_heads=1, splits=2, lengths=(40, 8)),  # 96 rows of queries: two tiles
    Call(head_dim=24, value_dim=40, heads=6),
    Call(head_dim=24, value_dim=40, splits=2),
    Call(page_size=16, block=32, heads=4),
    Call(page_size=5, heads=4),
    Call(window=9, splits=2),
    Call(window=9, queries=3, heads=4, splits=2, lengths=(37, 5, 3)),
    Call(softcap=1.5, sinks=True, splits=2),
    Call(softcap=1.5, sinks=True, heads=4),
    *(Call(dtype=dtype, heads=heads, splits=2) for dtype in ("bfloat16", "float16") for heads in (2, 4)),
    *(Call(codes=codes, heads=heads, splits=2) for codes in ("int8", "float8_e4m3fn") for heads in (2, 4)),
    *(Call(dtype=dtype, codes="int8", heads=4) for dtype in ("bfloat16", "float16")),
    Call(queries=70, lengths=(90, 70), dtype="bfloat16"),  # parts of prompts: two tiles, one part of the keys
    Call(queries=70, lengths=(90, 70), window=9, sinks=True),
]
SHORT, IN_CI = (1, 4), (5, 11, 12, 15, 18, 21, 24)


def marked(index: int, call: Call):
    if index in SHORT:
        return call
    return pytest.param(call, marks=pytest.mark.long if index in IN_CI else pytest.mark.slow)


@pytest.mark.parametrize(
    "call",
    [marked(index, call) for index, call in enumerate(CALLS)],
    ids=lambda call: (
        ", ".join(
            f"{field.name}={getattr(call, field.name)}"
            for field in dataclasses.fields(Call)
            if getattr(call, field.name) != field.default
        )
        or "default"
    ),
)
def test_heads_and_lse_equal_float64(call: Call) -> None:
    check(call)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "wrong", "call"),
    [
        ("_bounds", lambda right: lambda seen: right(seen).at[:, 1].add(-16), Call(splits=2)),
        ("_bounds", lambda right: lambda seen: right(seen).at[:, 0].add(16), Call(window=9)),
        ("_products", lambda right: lambda q, k, dot: right(q, k, dot) * 1.02, Call()),
        ("_joined", lambda right: lambda state: right(state)._replace(highest=state.highest[:1]), Call(splits=2)),
        (
            "_updated",
            lambda right: lambda state, *rest: right(state._replace(total=state.total * 0.99), *rest),
            Call(heads=4),
        ),
        ("_merged", lambda right: lambda form, dtype, heads, lse: right(form, dtype, heads, lse * 0.9), Call(splits=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_kernels_are_noticed(name, wrong, call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, name, wrong(getattr(decode, name)))
    monkeypatch.setattr(decode, "_attended", decode._attended.__wrapped__)  # `jax.jit` keeps what it traced before
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(call)


@pytest.mark.long
def test_merging_ignores_parts_without_keys() -> None:
    """More parts than blocks of keys give bitwise the result of as many parts as blocks."""
    call = Call(lengths=(37, 5, 16))
    q, pool, allowed, _ = arrays(call)
    few, many = (
        decode_attention(dataclasses.replace(call.form, splits=splits), q, pool, jnp.asarray(allowed))[0]
        for splits in (3, 7)
    )
    np.testing.assert_array_equal(few, many)
