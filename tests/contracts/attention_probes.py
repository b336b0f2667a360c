"""Third-party kernels and caches for the attention contracts. Another process imports them by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import (
    AttentionInputs,
    AttentionKernel,
    Contiguous,
    DecodingState,
    KernelRequest,
    KVCache,
    KVView,
    ReferenceKernel,
    TokenInfo,
    attend_in_parts,
    refusal,
)
from axcore.nn.kv.views import token_axes
from axcore.nn.tokens import CachedRows


class SplitKeys(AttentionKernel):
    """Attends to two halves of the keys with any kernel that takes `lse`, and merges."""

    class Config(AttentionKernel.Config):
        kernel: AttentionKernel.Config = ReferenceKernel.Config()

    takes = frozenset({"softcap", "sinks", "bias", "dropout", "lse"})

    def __init__(self, cfg, *, rngs):
        self.kernel = self.child("kernel", cfg.kernel, rngs, head_dim=cfg.head_dim)

    def supports(self, request: KernelRequest) -> str | None:
        inner = dataclasses.replace(request, key_len=request.key_len // 2, options=(*request.options, "lse"))
        return refusal(self.kernel, inner)

    def __call__(self, inputs: AttentionInputs) -> Any:
        kv, half = inputs.plain, inputs.plain.k.shape[1] // 2
        return attend_in_parts(self.kernel, inputs, [kv.block(0, half), kv.block(half, kv.k.shape[1] - half)])


class LocalKernel(ReferenceKernel):
    """The reference kernel under `shard_map`. It fails if its inputs are larger than the shards of one device."""

    local = True

    def __call__(self, inputs: AttentionInputs) -> Any:
        kv = inputs.plain
        if jax.device_count() == 8 and inputs.q.shape[0] == 2:
            assert inputs.q.shape[:3] == (2, 4, 2), inputs.q.shape
            assert kv.k.shape[:3] == (2, 8, 1), kv.k.shape
            assert inputs.sinks.shape == (2,)
            assert inputs.query.segment_ids.shape == (2, 4)
        return super().__call__(inputs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages(KVView):
    """Pages of int8 codes, with a scale for each token and head. Rows share the pools; `table` lists their pages."""

    pools: Any
    """For keys and for values: (codes [*layer, page, slot, kv_head, dim], scales [*layer, page, slot, kv_head])."""
    table: jax.Array
    tokens: TokenInfo
    layer: tuple[jax.Array, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        codes = self.pools["keys"][0]
        return (self.table.shape[0], self.table.shape[1] * codes.shape[-3], *codes.shape[-2:])

    @property
    def value_dim(self) -> int:
        return self.pools["values"][0].shape[-1]

    @property
    def dtype(self) -> Any:
        return self.pools["keys"][1].dtype

    def block(self, start: jax.Array | int, size: int) -> Contiguous:
        page = self.pools["keys"][0].shape[-3]
        places = start + jnp.arange(size)
        at = (*self.layer, self.table[:, places // page], places % page)
        k, v = (decoded(codes[at], scales[at]) for codes, scales in (self.pools["keys"], self.pools["values"]))
        return Contiguous(k, v, self.tokens.part(start, size))

    def axes(self) -> Any:
        spec = jax.sharding.PartitionSpec
        pools = jax.tree.map(lambda _: spec(), self.pools)
        return Pages(pools, spec("batch", None), token_axes(self.tokens, "kv_seq"), (spec(),) * len(self.layer))  # type: ignore


class PagedInt8Cache(KVCache):
    """Stores int8 codes in pages. The step assigns pages to rows."""

    class Config(KVCache.Config):
        num_kv_heads: int = ax.REQUIRED
        head_dim: int = ax.REQUIRED
        value_dim: int | None = None
        page: int = 4
        pages: int = 24

    def __init__(self, cfg, *, rngs):
        value_dim = cfg.head_dim if cfg.value_dim is None else cfg.value_dim
        axes = (None, None, "kv_head", None)
        for name, dim in (("keys", cfg.head_dim), ("values", value_dim)):
            codes = jnp.zeros((cfg.pages, cfg.page, cfg.num_kv_heads, dim), jnp.int8)
            setattr(self, name, DecodingState(codes, axes=axes))
            setattr(self, f"{name}_scale", DecodingState(jnp.zeros(codes.shape[:3]), axes=axes[:3]))

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs:
        rows: CachedRows = self.rows(inputs)
        assert rows.pages is not None
        new, page = inputs.plain, self.config.page
        row, place = jnp.arange(inputs.q.shape[0])[:, None], jnp.broadcast_to(inputs.query.index, inputs.q.shape[:2])
        pages = rows.pages[row, place // page]
        if inputs.query.valid is not None:  # padding goes to a page that does not exist
            pages = jnp.where(inputs.query.valid, pages, self.config.pages)
        pools = {}
        for name, values in (("keys", new.k), ("values", new.v)):
            stored = getattr(self, name), getattr(self, f"{name}_scale")
            for state, part in zip(stored, encoded(values), strict=True):
                state.put((pages, place % page), part)
            pools[name] = tuple(state.whole for state in stored)
        size = rows.pages.shape[1] * page
        return inputs.replace(kv=Pages(pools, rows.pages, rows.tokens.part(0, size), self.keys.layer))


class RoundedKV(KVCache):
    """Stores nothing. Rounds keys and values like `PagedInt8Cache`, so that a full forward pass is the reference."""

    class Config(KVCache.Config):
        value_dim: int | None = None

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs:
        kv = inputs.plain
        k, v = (decoded(*encoded(x)) for x in (kv.k, kv.v))
        return inputs.replace(kv=dataclasses.replace(kv, k=k, v=v))


def encoded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 codes, and a float32 scale for each vector of the last dimension."""
    scale = jnp.abs(x).max(-1, initial=1e-9) / 127
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale


def decoded(codes: jax.Array, scale: jax.Array) -> jax.Array:
    return codes * scale[..., None]
