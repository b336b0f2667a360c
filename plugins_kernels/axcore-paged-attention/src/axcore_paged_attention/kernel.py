"""The attention kernel for decoding and for parts of prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any  # a config of any attention

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

import axcore as ax
from axcore.config import has_field
from axcore.nn import (
    LSE,
    Attention,
    AttentionInputs,
    ChooseKernel,
    Contiguous,
    Heads,
    InCache,
    KernelRequest,
    KVView,
    Paged,
    TunableKernel,
    visible,
)
from axcore.parallel import target_device
from axcore_paged_attention.decode import ROWS, Form, Pool, decode_attention, rows_of

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
LARGEST_HEAD_DIM = 256
PROGRAMS = 4096
"""Number of programs that the default number of splits aims at: many for each of the 132 multiprocessors of an H100, so
that rows of different lengths do not leave multiprocessors without work."""
FULL_PROGRAMS = 256
"""The same for programs whose queries fill a product on tensor cores, which are long: each part of the keys writes the
heads of all queries."""
MIN_KEYS = 64
"""Smallest number of keys in a part, if rows have as many keys as the cache has places."""
_WITHOUT_FLOAT8 = ("A100", "A800", "A10", "A30", "A40", "RTX A")
"""Substrings of the names of GPUs that cannot convert float8_e4m3fn."""


class PagedAttention(TunableKernel):
    """Attention of decoding and of parts of prompts on NVIDIA GPUs, which reads keys and values of a KV cache in place.

    It reads pages and rows of a cache, as bfloat16, float16, float32, int8 or float8_e4m3fn numbers, and supports every
    mask, grouped-query attention, softcap, sinks, the log-sum-exp and several queries per row. Keys are split into
    parts that different multiprocessors compute (Dao et al. 2023, Flash-Decoding). Keys before the first and after the
    last that a row sees are not read. It has no backward pass.
    """

    class Config(TunableKernel.Config):
        max_queries: ax.PositiveInt = 128
        """Largest number of queries of a row: draft tokens that are verified, or parts of prompts. By default, it is
        the largest part of an engine."""
        block: ax.PositiveInt | None = None
        """Keys that a program reads at once, a power of two from 16 on; None: 64 on tensor cores, 32 otherwise and for
        64 queries of plain numbers, and half of it for a head_dim above 128."""
        splits: ax.PositiveInt | None = None
        """Parts into which the keys of a row are split; None: enough for a few thousand programs, of at least 64 keys
        each."""
        dot_rows: ax.PositiveInt | None = None
        """Smallest number of queries of a kv head that are multiplied on tensor cores, which pad them to 16: 1 or 2.
        None: 1 for caches of 16-bit numbers, otherwise 2, whichever was faster on an H200."""
        num_warps: ax.PositiveInt | None = None
        """Warps of a program, a power of two; None: 4."""
        num_stages: ax.PositiveInt | None = None
        """Stages in which Triton overlaps loads and products on tensor cores; None: 2, and 3 for 64
        queries of plain numbers."""
        interpret: bool = False
        """Whether the Pallas interpreter runs the kernel on a CPU, which is slow. For tests."""

    takes = frozenset({"softcap", "sinks", "lse"})
    views = (Contiguous, InCache, Paged)
    uses_dtypes = False

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        if problem := _problem({name: getattr(cfg, name) for name in ("block", "num_warps", "dot_rows")}):
            raise ax.ConfigError(f"{problem}. Set it to None")

    def settings(self, request: KernelRequest) -> dict[str, int]:
        """See `axcore.nn.TunableKernel`.

        Raises:
            ConfigError: measured settings are not valid.
        """
        found = super().settings(request)
        if problem := _problem(found):
            raise ax.ConfigError(f"tuning: {problem}. Measure again, or set tuning=None")
        return found

    def supports(self, request: KernelRequest) -> str | None:
        """See `axcore.nn.AttentionKernel`."""
        if self.config.interpret and request.platform != "cpu":
            return f"interpret=True is for tests on a CPU, got {request.platform}"
        if not self.config.interpret and request.platform != "gpu":
            return f"requires an NVIDIA GPU, got {request.platform}"
        if request.phase == "train":
            return "has no backward pass for training"
        if request.query_len > self.config.max_queries:
            return f"supports max_queries={self.config.max_queries} queries per row, got {request.query_len}"
        return _numbers(request)

    def candidates(self, request: KernelRequest) -> Iterator[dict[str, int]]:
        """See `axcore.nn.TunableKernel`."""
        most = max(1, request.key_len // 16)
        seen = set()
        for factor in (1.0, 0.5, 2.0, 4.0):
            for dot_rows in (1, 2) if _prefers_dots(request) else (2, 1):
                rows = rows_of(request.query_len, request.num_heads // request.num_kv_heads, dot_rows)
                default = _splits(request, rows)
                size, stages = _block(request, rows), 3 if _is_full(request, rows) else 2
                for block, num_warps, num_stages in (
                    (size, 4, stages),
                    (size // 2, 4, stages),
                    (size * 2, 4, stages),
                    (size, 2, stages),
                    (size, 8, stages),
                    (size, 4, 5 - stages),
                ):
                    splits = max(1, min(most, round(default * factor)))
                    found = (max(16, block), splits, dot_rows, num_warps, num_stages)
                    if found not in seen:
                        seen.add(found)
                        names = ("block", "splits", "dot_rows", "num_warps", "num_stages")
                        yield dict(zip(names, found, strict=True))

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """See `AttentionKernel`.

        Raises:
            ConfigError: the cache is one array of codes with 2**31 to 2**32 numbers, which Triton addresses wrongly.
        """
        view, settings = inputs.keys, self.settings(KernelRequest.of(inputs))
        pool = pool_of(view)
        for name, x in (("keys", pool.k), ("values", pool.v)):
            if x.dtype.itemsize == 1 and 2**31 < x.size <= 2**32:
                raise ax.ConfigError(
                    f"{self.frame.path}: the cache stores {x.size} numbers of {name} of type {x.dtype} in one array, "
                    f"and the kernel requires at most 2**31 or more than 2**32. Change num_pages, batch_size or max_len"
                )
        platform, device_kind = target_device()
        form = Form(
            inputs.scale,
            inputs.softcap,
            **settings,
            interpret=self.config.interpret,
            device_kind=device_kind if platform == "gpu" else None,
        )
        heads, lse = decode_attention(form, inputs.q, pool, _allowed(inputs), inputs.sinks)
        return heads, lse if inputs.return_lse else None


def use_paged_attention(
    cfg: ax.Config, max_queries: int = 128, interpret: bool = False, where: ax.Where = Attention
) -> ax.Config:
    """Lets every selected attention decode with `PagedAttention`, and compute parts of prompts. Other calls run the
    kernels that it had before.

    Args:
        max_queries, interpret: see `PagedAttention.Config`.
        where: selects attentions.
    """
    paged = PagedAttention.Config(max_queries=max_queries, interpret=interpret)

    def put(_: str, attention: Any) -> ax.Config:
        before = attention.kernel
        while has_field(before, "kernel"):  # a kernel that wraps another
            before = before.kernel
        order = before.order if isinstance(before, ChooseKernel.Config) else (before,)
        others = (each for each in order if not isinstance(each, PagedAttention.Config))
        edited: ax.Config = attention.put(kernel=ChooseKernel.Config(order=(paged, *others)))
        return edited

    return ax.select(cfg, where).map(put)


def pool_of(view: KVView) -> Pool:
    """The keys and values of a view, in place. A row of a cache is one page."""
    match view:
        case Paged(k=k, v=v, layer=layer, scales=scales, table=table):
            pass
        case InCache(k=k, v=v, layer=layer, scales=scales, slots=slots):
            rows = jnp.arange(k.shape[len(layer)], dtype=jnp.int32) if slots is None else slots
            table = rows[:, None]
        case Contiguous(k=k, v=v):
            layer, scales = (), None
            table = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None]
        case _:
            raise TypeError(f"no pool of a {type(view).__name__}")
    lead = k.shape[: len(layer)]
    index = jnp.int32(0)
    for size, each in zip(lead, layer, strict=True):
        index = index * size + each

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(math.prod(lead), *x.shape[len(lead) :])

    return Pool(flat(k), flat(v), jax.tree.map(flat, scales), index.astype(jnp.int32)[None], table)


def _allowed(inputs: AttentionInputs) -> Bool[Array, "batch_or_1 query kv_seq"]:
    """Which keys a query sees."""
    view = inputs.keys
    allowed = visible(inputs.mask, inputs.query, view.tokens)
    if isinstance(view, Paged):
        allowed &= (jnp.arange(view.shape[1]) < view.lengths[:, None])[:, None]
    return jnp.broadcast_to(allowed, (allowed.shape[0], inputs.q.shape[1], view.shape[1]))


def _problem(settings: Mapping[str, int | None]) -> str:
    """What is wrong with the settings; empty if nothing is."""
    for name, least, most in (("block", 16, 256), ("num_warps", 1, 16)):
        value = settings[name]
        if value is not None and not (value.bit_count() == 1 and least <= value <= most):
            return f"{name}={value} is not a power of two from {least} to {most}"
    rows = settings["dot_rows"]
    return "" if rows in (None, 1, 2) else f"dot_rows={rows} is not 1 or 2"


def _numbers(request: KernelRequest) -> str | None:
    """Why the kernel does not support these dtypes and widths; None if it does."""
    if request.dtype not in DTYPES:
        return f"computes in bfloat16, float16 or float32, not {request.dtype} (the model's dtypes.compute)"
    if request.codes == jnp.float8_e4m3fn and any(name in request.device_kind for name in _WITHOUT_FLOAT8):
        return f"requires a GPU with float8 numbers for float8 codes, got {request.device_kind}"
    if request.codes not in (None, jnp.int8, jnp.float8_e4m3fn):
        return f"reads int8 and float8_e4m3fn codes, not {request.codes}"
    for name, width in (("head_dim", request.head_dim), ("value_dim", request.value_dim)):
        if not 0 < width <= LARGEST_HEAD_DIM:
            return f"requires a {name} from 1 to {LARGEST_HEAD_DIM}, got {width}"
    return None


def _prefers_dots(request: KernelRequest) -> bool:
    return request.codes is None and request.dtype.itemsize == 2


def _is_full(request: KernelRequest, rows: int) -> bool:
    """Whether a program has as many queries of a cache of plain numbers as it can."""
    return rows == ROWS and request.codes is None


def _block(request: KernelRequest, rows: int) -> int:
    """The default number of keys that a program reads at once."""
    if rows > 1:
        size = 32 if _is_full(request, rows) else 64
    else:
        size = 16 if request.codes is not None else 32
    return size // 2 if max(request.head_dim, request.value_dim) > 128 else size


def _splits(request: KernelRequest, rows: int) -> int:
    """The default number of parts."""
    queries = request.query_len * request.num_heads // request.num_kv_heads
    programs = request.batch * request.num_kv_heads * -(-queries // rows)
    wanted = FULL_PROGRAMS if rows == ROWS else PROGRAMS
    return max(1, min(-(-wanted // programs), request.key_len // MIN_KEYS))
