"""Attention of the queries of decoding and of parts of prompts to the keys of a KV cache, with Pallas for Triton.

The keys of each row are split into parts (flash decoding). A program computes one part of one kv head for up to `ROWS`
of the queries that share the head. A second kernel merges the parts by their log-sum-exp, if there are several.
Programs read only the blocks of keys between the first and the last that a query of the row sees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import AbstractDevice, AbstractMesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Num

ROWS = 64
"""Largest number of queries of a kv head in one program."""
DOT_ROWS = 16
"""Size of the smallest operand of a product on tensor cores."""
LOW = -1e30
"""The logit of a key that is not seen. It is finite, since the difference of two infinities is NaN."""


class Pool(NamedTuple):
    """Keys and values in pages. A cache with a row of places for each slot has one page for each slot.

    Attributes:
        k, v: keys and values, or their codes.
        scales: the scales of codes; None if `k` and `v` are not codes.
        layer: the index of the layer.
        table: the pages of each row.
    """

    k: Num[Array, "layer page page_size kv_head head_dim"]
    v: Num[Array, "layer page page_size kv_head value_dim"]
    scales: tuple[Float32[Array, "layer page page_size kv_head"], Float32[Array, "layer page page_size kv_head"]] | None
    layer: Int[Array, " 1"]
    table: Int[Array, "batch pages_per_row"]


@dataclasses.dataclass(frozen=True)
class Form:
    """The static arguments of a call.

    Attributes:
        scale, softcap: see `axcore.nn.AttentionInputs`.
        block: keys that a program reads at once.
        splits: parts of the keys of a row.
        dot_rows: smallest number of queries of a kv head that are multiplied on tensor cores.
        num_warps, num_stages: parameters of Triton.
        interpret: whether the Pallas interpreter runs the kernel.
        device_kind: the kind of GPU that the program is compiled for; None: the default device.
    """

    scale: float
    softcap: float | None = None
    block: int = 32
    splits: int = 1
    dot_rows: int = 2
    num_warps: int = 4
    num_stages: int = 2
    interpret: bool = False
    device_kind: str | None = None


def decode_attention(
    form: Form,
    q: Float[Array, "batch query head head_dim"],
    pool: Pool,
    allowed: Bool[Array, "batch_or_1 query kv_seq"],
    sinks: Float[Array, " head"] | None = None,
) -> tuple[Float[Array, "batch query head value_dim"], Float32[Array, "batch query head"]]:
    """Attention to the keys of a pool.

    Args:
        allowed: whether a query sees a key. Keys that no query sees may be NaN, and their pages may have any number.

    Returns:
        The heads in the dtype of q, 0 for queries without keys and sinks, and the log-sum-exp, then below -1e30.
    """
    # Programs read whole blocks of the mask.
    allowed = jnp.pad(allowed, ((0, 0), (0, 0), (0, -allowed.shape[2] % form.block)))
    seen = allowed.any(1)
    operands: tuple[Array, ...] = (
        pool.layer,
        pool.table,
        _bounds(seen),
        seen.astype(jnp.int8),
        allowed.astype(jnp.int8),
        q,
        pool.k,
        pool.v,
        *(pool.scales or ()),
    )
    more = () if sinks is None else (sinks.astype(jnp.float32),)
    with _compiled_for(form.device_kind):
        heads, lse = _attended(form, q.dtype, operands, more)
    return heads, lse


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced once for all layers of a model
def _attended(
    form: Form, dtype: jnp.dtype, operands: tuple[Array, ...], sinks: tuple[Array, ...]
) -> tuple[Float[Array, "batch query head value_dim"], Float32[Array, "batch query head"]]:
    """The merged parts. `operands` are those of `_kernel`."""

    def call(operands: tuple[Array, ...], sinks: tuple[Array, ...]) -> tuple[Array, Array]:
        if form.splits > 1 or sinks:
            return _merged(form, dtype, *_parts(form, jnp.float32, *operands), *sinks)
        heads, lse = _parts(form, dtype, *operands)
        return heads[0], lse[0]

    # Triton has only three grid axes, which the kernels use, so `vmap` calls them once for each element.
    heads, lse = jax.custom_batching.sequential_vmap(call)(operands, sinks)
    return heads, lse


def rows_of(queries: int, group: int, dot_rows: int) -> int:
    """The queries of a kv head in one program, a power of two.

    Args:
        queries: number of queries of a row of the batch.
        group: number of heads that share a kv head.
        dot_rows: see `Form`.
    """
    count = queries * group
    if count == 1 and dot_rows > 1:
        return 1
    return max(DOT_ROWS, min(ROWS, pl.next_power_of_2(count)))


def _parts(
    form: Form, dtype: DTypeLike, *operands: Array
) -> tuple[Float[Array, "split batch query head value_dim"], Float32[Array, "split batch query head"]]:
    """The heads in `dtype` and the log-sum-exp of each part of the keys. `operands` are those of `_kernel`."""
    _, _, _, _, _, q, _, v, *scales = operands
    batch, queries, num_heads, _ = q.shape
    kv_heads, value_dim = v.shape[-2:]
    rows = rows_of(queries, num_heads // kv_heads, form.dot_rows)
    tiles = -(-queries * (num_heads // kv_heads) // rows)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    shape = (form.splits, batch, queries, num_heads)
    heads, lse = pl.pallas_call(
        functools.partial(_kernel, form=form, rows=rows, tiles=tiles, has_scales=bool(scales)),
        grid=(kv_heads, form.splits, batch * tiles),
        in_specs=[whole] * len(operands),
        out_specs=[whole, whole],
        out_shape=[jax.ShapeDtypeStruct((*shape, value_dim), dtype), jax.ShapeDtypeStruct(shape, jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=form.num_warps, num_stages=form.num_stages),
        interpret=form.interpret,
        name="paged_attention",
    )(*operands)
    return heads, lse


def _merged(
    form: Form,
    dtype: jnp.dtype,
    heads: Float32[Array, "split batch query head value_dim"],
    lse: Float32[Array, "split batch query head"],
    *sinks: Float32[Array, " head"],
) -> tuple[Float[Array, "batch query head value_dim"], Float32[Array, "batch query head"]]:
    """The heads and the log-sum-exp of all keys. One kernel, since XLA would compute this in three."""
    _, batch, queries, num_heads, _ = heads.shape
    whole = pl.BlockSpec(memory_space=pl.ANY)
    merged, total = pl.pallas_call(
        _merge_kernel,
        grid=(num_heads, queries, batch),
        in_specs=[whole] * (2 + len(sinks)),
        out_specs=[whole, whole],
        out_shape=[jax.ShapeDtypeStruct(heads.shape[1:], dtype), jax.ShapeDtypeStruct(lse.shape[1:], jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=form.interpret,
        name="merge_parts",
    )(heads, lse, *sinks)
    return merged, total


@contextlib.contextmanager
def _compiled_for(device_kind: str | None) -> Iterator[None]:
    """Names the GPU that Pallas compiles for, which is the default device otherwise."""
    mesh = jax.sharding.get_abstract_mesh()
    known = jax.devices()[0] if mesh.abstract_device is None else mesh.abstract_device
    if device_kind in (None, known.device_kind):
        yield
        return
    device = AbstractDevice(device_kind=device_kind, num_cores=None, platform="gpu")
    mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _bounds(seen: Bool[Array, "batch_or_1 kv_seq"]) -> Int[Array, "batch_or_1 2"]:
    """The first key that a query sees, and the end of the last; the end is 0 if there is none."""
    index = jnp.arange(seen.shape[1], dtype=jnp.int32)
    first = jnp.where(seen, index, seen.shape[1]).min(1)
    return jnp.stack([first, jnp.where(seen, index + 1, 0).max(1)], axis=1)


class _State(NamedTuple):
    """The softmax of the keys so far, by row of queries and, without tensor cores, by position in the block.

    Attributes:
        highest: the largest logit, in units of log 2.
        total: the sum of the weights.
        heads: the weighted sum of the values.
    """

    highest: Array
    total: Array
    heads: Array


def _kernel(
    layer_ref: Any,
    table_ref: Any,
    bounds_ref: Any,
    seen_ref: Any,
    allowed_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *refs: Any,
    form: Form,
    rows: int,
    tiles: int,
    has_scales: bool,
) -> None:
    """One part of one kv head, for `rows` queries. References have no public types."""
    *scale_refs, heads_ref, lse_ref = refs
    kv_head, split, last = (pl.program_id(axis) for axis in range(3))
    batch, tile = jax.lax.div(last, tiles), jax.lax.rem(last, tiles)
    _, queries, num_heads, head_dim = q_ref.shape
    _, num_pages, page_size, kv_heads, value_dim = v_ref.shape
    group = num_heads // kv_heads
    use_dot = rows > 1

    row = tile * rows + jnp.arange(rows)
    query, head = jax.lax.div(row, group), kv_head * group + jax.lax.rem(row, group)
    exists = (row < queries * group)[:, None]
    dims, value_dims = (jnp.arange(max(DOT_ROWS, pl.next_power_of_2(size))) for size in (head_dim, value_dim))
    q_mask = exists & (dims < head_dim)[None]
    q = triton.load(q_ref.at[batch, query[:, None], head[:, None], dims[None]], mask=q_mask, other=0)
    layer = layer_ref[0]
    shared = 0 if allowed_ref.shape[0] == 1 else batch
    first, end = bounds_ref[shared, 0], bounds_ref[shared, 1]
    first = jax.lax.div(first, form.block) * form.block  # the loads of the mask are aligned
    each = pl.cdiv(pl.cdiv(end - first, form.block), form.splits) * form.block
    first += split * each
    end = jnp.minimum(first + each, end)

    def read(ref: Any, at: tuple[Array, Array], dims: Array, size: int, seen: Array) -> Array:
        page, place = (x[:, None] for x in at)
        mask = seen[:, None]
        mask = mask if size == dims.size else mask & (dims < size)[None]
        zero = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
        return triton.load(ref.at[layer, page, place, kv_head, dims[None]], mask=mask, other=zero)

    def body(index: Array, state: _State) -> _State:
        key = first + index * form.block + jnp.arange(form.block)
        # Loaded instead of computed from `allowed`, so that the loads of keys do not wait for a reduction.
        seen = triton.load(seen_ref.at[shared, key]) > 0
        allowed = seen[None]
        if queries > 1:
            mask = (row < queries * group)[:, None]
            allowed = triton.load(allowed_ref.at[shared, query[:, None], key[None]], mask=mask, other=0) > 0
        # Pages of keys that no query sees are also read, so that this does not wait for `allowed`.
        page = triton.load(table_ref.at[batch, jax.lax.div(key, page_size)], mask=key < end, other=0)
        at = jnp.clip(page, 0, num_pages - 1), jax.lax.rem(key, page_size)
        k = read(k_ref, at, dims, head_dim, seen)
        v = read(v_ref, at, value_dims, value_dim, seen)
        logits = _products(q, k, use_dot) * form.scale
        if has_scales:
            k_scale, v_scale = (
                triton.load(ref.at[layer, at[0], at[1], kv_head], mask=seen, other=0) for ref in scale_refs
            )
            logits *= k_scale[None]
            v = v.astype(jnp.float32) * v_scale[:, None]
        if form.softcap is not None:
            logits = form.softcap * jnp.tanh(logits / form.softcap)
        logits = jnp.where(allowed, logits * math.log2(math.e), LOW)
        return _updated(state, logits, allowed, v.astype(q.dtype) if use_dot else v.astype(jnp.float32), use_dot)

    lanes = rows if use_dot else form.block
    low, zero = jnp.full(lanes, LOW, jnp.float32), jnp.zeros(lanes, jnp.float32)
    state = _State(low, zero, jnp.zeros((lanes, value_dims.size), jnp.float32))
    state = jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(end - first, 0), form.block), body, state)
    highest, total, heads = state if use_dot else _joined(state)
    found = jnp.where(total > 0, total, 1)
    lse = jnp.where(total > 0, (highest + jnp.log2(found)) * math.log(2), LOW * 2)
    mask = exists & (value_dims < value_dim)[None]
    place = heads_ref.at[split, batch, query[:, None], head[:, None], value_dims[None]]
    triton.store(place, (heads / found[:, None]).astype(heads_ref.dtype), mask=mask)
    triton.store(lse_ref.at[split, batch, query, head], lse, mask=row < queries * group)


def _merge_kernel(heads_ref: Any, lse_ref: Any, *refs: Any) -> None:
    """Merges the parts of one query and head."""
    *sink_refs, merged_ref, total_ref = refs
    head, query, batch = (pl.program_id(axis) for axis in range(3))
    splits, *_, value_dim = heads_ref.shape
    split, dims = (jnp.arange(pl.next_power_of_2(size)) for size in (splits, value_dim))
    lse = triton.load(lse_ref.at[split, batch, query, head], mask=split < splits, other=4 * LOW)
    highest = lse.max()
    if sink_refs:
        sink = triton.load(sink_refs[0].at[head])
        highest = jnp.maximum(highest, sink)
    # A query that sees no key has the weight 1 in each part, and heads of 0.
    weights = jnp.where(split < splits, jnp.exp(lse - highest), 0.0)
    total = weights.sum() + (jnp.exp(sink - highest) if sink_refs else 0.0)
    mask = (split < splits)[:, None] & (dims < value_dim)[None]
    heads = triton.load(heads_ref.at[split[:, None], batch, query, head, dims[None]], mask=mask, other=0)
    merged = (heads * (weights / total)[:, None]).sum(0)
    place = merged_ref.at[batch, query, head, dims]
    triton.store(place, merged.astype(merged_ref.dtype), mask=dims < value_dim)
    triton.store(total_ref.at[batch, query, head], highest + jnp.log(total))


def _products(q: Array, k: Array, use_dot: bool) -> Float32[Array, "rows block"]:
    """The products of queries and keys."""
    if use_dot:
        return _dot(q, k.astype(q.dtype), trans_b=True)
    return (q.astype(jnp.float32) * k.astype(jnp.float32)).sum(1)[None]


def _updated(state: _State, logits: Array, allowed: Array, v: Array, use_dot: bool) -> _State:
    """The state after one more block. Without tensor cores, each position in the block has its own softmax, so that the
    threads of a program do not wait for each other."""
    if not use_dot:
        logits, allowed = logits[0], allowed[0]
    highest = jnp.maximum(state.highest, logits.max(1) if use_dot else logits)
    weights = jnp.where(allowed, jnp.exp2(logits - (highest[:, None] if use_dot else highest)), 0.0)
    shrink = jnp.exp2(state.highest - highest)
    total = state.total * shrink + (weights.sum(1) if use_dot else weights)
    added = _dot(weights.astype(v.dtype), v) if use_dot else weights[:, None] * v
    return _State(highest, total, state.heads * shrink[:, None] + added)


def _joined(state: _State) -> _State:
    """The state of one row of queries, from that of each position in the block."""
    highest = state.highest.max(0)
    shrink = jnp.exp2(state.highest - highest)
    total = (state.total * shrink).sum(0)
    heads = (state.heads * shrink[:, None]).sum(0)[None]
    return _State(jnp.full(1, highest), jnp.full(1, total), heads)


def _dot(a: Array, b: Array, trans_b: bool = False) -> Float32[Array, "m n"]:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return triton.dot(a, b, trans_b=trans_b, precision=precision)
