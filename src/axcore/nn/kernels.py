"""Attention kernels: softmax(q k^T) v under a mask, and what an attention asks of one."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from axcore.config import REQUIRED, ConfigError, at_least
from axcore.module import Layer, Rngs
from axcore.nn.dropout import dropped
from axcore.nn.masks import Mask, visible
from axcore.nn.tokens import TokenInfo

Bias = Callable[[TokenInfo, TokenInfo], jax.Array]
"""(query, key) -> float32 [batch or 1, head, query, key]."""

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("axcore_platform", default=None)


@contextlib.contextmanager
def on_platform(name: str) -> Iterator[None]:
    """For tracing as if on another platform: kernels are asked whether they can serve there, and one that cannot run
    here is replaced by zeros. What is traced so must not be run."""
    token = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(token)


@dataclasses.dataclass(frozen=True)
class KernelRequest:
    """What one attention asks of its kernel; all of it is known when the call is traced.

    Attributes:
        platform: "cpu", "gpu" or "tpu", as in `jax.default_backend()`.
        dtype: of q, k and v.
        value_dim: features of v in each head; that of the others is `head_dim`.
        packed: whether rows hold several documents.
        partial: whether some keys do not exist (`TokenInfo.valid` is given).
        options: which of the kernel's optional arguments are used, such as `scale` or `sinks`.
    """

    platform: str
    dtype: np.dtype[Any]
    batch: int
    query_len: int
    key_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    mask: Mask
    packed: bool
    partial: bool
    options: tuple[str, ...]

    @classmethod
    def of(
        cls, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, query: TokenInfo, key: TokenInfo, **options: Any
    ) -> KernelRequest:
        """The request that a call with these arguments makes."""
        return cls(
            platform=_platform.get() or jax.default_backend(),
            dtype=q.dtype,
            batch=q.shape[0],
            query_len=q.shape[1],
            key_len=k.shape[1],
            num_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            mask=mask,
            packed=query.segment_ids is not None or key.segment_ids is not None,
            partial=key.valid is not None,
            options=tuple(name for name, value in options.items() if value is not None),
        )


class AttentionKernel(Layer):
    """Base of the layers that fill attention's kernel slot."""

    class Config(Layer.Config):
        head_dim: int = REQUIRED

    local: ClassVar[bool] = False
    """True for a kernel that the compiler cannot partition: the core then runs it under `shard_map`, and it sees the
    rows and heads of one device."""

    def supports(self, request: KernelRequest) -> str | None:
        """None if this kernel can do it; else why not, as in "it needs a GPU"."""
        return None

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Mask,
        query: TokenInfo,
        key: TokenInfo,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
        bias: Bias | None = None,
        dropout: tuple[float, jax.Array] | None = None,
    ) -> jax.Array:
        """Attends. The arguments after the star are passed only where they are not None; a kernel that does not take
        one of them is never asked to.

        Args:
            q: [batch, seq, head, head_dim].
            k, v: [batch, kv_seq, kv_head, head_dim]; each kv head serves `head / kv_head` consecutive heads.
            mask: which keys a query may see; `axcore.nn.visible` adds which keys exist. What a query that sees none
                gets is not defined.
            query, key: where the tokens of q and of k stand.
            scale: of the logits; None: 1 / sqrt(head_dim).
            softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2, arXiv 2408.00118, section 2).
            sinks: [head], the logit of one more key for each head, which has no value (gpt-oss; Xiao et al. 2023,
                arXiv 2309.17453).
            bias: what is added to the logits, after `softcap`; it may be asked for a part of the queries.
            dropout: (rate, key): each weight is zeroed with this chance, and the others are scaled up.

        Returns:
            [batch, seq, head, features of v] in the dtype of q.
        """
        raise NotImplementedError


def refusal(kernel: AttentionKernel, request: KernelRequest) -> str | None:
    """Why this kernel cannot do it: what it says itself, or an argument that it does not take."""
    parameters = inspect.signature(type(kernel).__call__).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in request.options if name not in parameters and not free]
    if unknown:
        return f"it does not take {' and '.join(unknown)}"
    if kernel.local and "bias" in request.options:
        return "it sees the heads of one device, and a bias is for all heads"
    if kernel.local and "dropout" in request.options:
        return "it sees the rows and heads of one device, and every device would drop the same weights"
    try:
        return kernel.supports(request)
    except Exception as error:
        raise ConfigError(f"{type(kernel).__name__}.supports raised {type(error).__name__}: {error}") from error


class ReferenceKernel(AttentionKernel):
    """The formula as it stands, softmax in float32 (Vaswani et al. 2017, arXiv 1706.03762, eq. 1). Runs anywhere.

    Long rows are attended a chunk of queries at a time, so memory grows with `chunk * kv_seq`; the backward pass
    computes each chunk's logits again.
    """

    class Config(AttentionKernel.Config):
        chunk: int | None = 1024
        """Queries that are attended at once; None: all."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "chunk")

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Mask,
        query: TokenInfo,
        key: TokenInfo,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
        bias: Bias | None = None,
        dropout: tuple[float, jax.Array] | None = None,
    ) -> jax.Array:
        """See `AttentionKernel`. A query that sees no key gets a mean over all of them."""
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        attend = functools.partial(
            _attend, k=k, v=v, mask=mask, key=key, scale=scale, softcap=softcap, sinks=sinks, bias=bias
        )
        rate, bits = dropout or (0.0, None)
        seq, chunk = q.shape[1], self.config.chunk
        if chunk is None or seq <= chunk:
            return attend(q, query, bits, rate=rate)

        def split(x: jax.Array) -> jax.Array:  # [batch, seq, ...] -> [chunks, batch, chunk, ...]
            widths = [(0, -seq % chunk) if axis == 1 else (0, 0) for axis in range(x.ndim)]
            return rearrange(jnp.pad(x, widths, mode="edge"), "b (c s) ... -> c b s ...", s=chunk)

        chunks = *jax.tree.map(split, (q, query)), None if bits is None else jax.random.split(bits, -(-seq // chunk))
        out = jax.lax.map(jax.checkpoint(lambda each: attend(*each, rate=rate)), chunks)
        return rearrange(out, "c b s ... -> b (c s) ...")[:, :seq]


def _attend(
    q: jax.Array,
    query: TokenInfo,
    bits: jax.Array | None,
    *,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    key: TokenInfo,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
    bias: Bias | None,
    rate: float,
) -> jax.Array:
    batch, seq, num_heads, _ = q.shape
    num_kv_heads = k.shape[2]
    # The heads that share keys are rows of one product: one batched matrix product, and no copy of k and v.
    rows = rearrange(q * scale, "b s (n g) d -> b n (g s) d", n=num_kv_heads)
    logits = jnp.einsum("bnqd,btnd->bnqt", rows, k, preferred_element_type=jnp.float32)
    logits = logits.reshape(batch, num_heads, seq, -1)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias(query, key)
    logits = jnp.where(visible(mask, query, key)[:, None], logits, jnp.finfo(jnp.float32).min)
    if sinks is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (batch, num_heads, seq, 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, column], axis=-1), axis=-1)[..., :-1]
    if bits is not None:
        weights = dropped(weights, rate, bits)
    weights = weights.astype(v.dtype).reshape(batch, num_kv_heads, -1, k.shape[1])
    out = jnp.einsum("bnqt,btnd->bnqd", weights, v)
    return rearrange(out, "b n (g s) d -> b s (n g) d", s=seq)
