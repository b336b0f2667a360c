"""The Splash kernels: forward with the log-sum-exp, and backward from a given log-sum-exp.

The public `make_splash_mha` returns either a differentiable result or the log-sum-exp, not both, so these functions
call the kernels below it. They are private to jax, so importing this module checks that they exist. A call runs on one
device: shard it with `axcore.parallel.shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from axcore_splash.blocks import Blocks, Tile, padded

_PACKAGE = "jax.experimental.pallas.ops.tpu.splash_attention"
_NAMES = {
    "splash_attention_kernel": (
        "_splash_attention_forward",
        "_splash_attention_bwd_dkv",
        "_splash_attention_bwd_dq",
        "BlockSizes",
        "QKVLayout",
        "SegmentIds",
        "DEFAULT_MASK_VALUE",
    ),
    "splash_attention_mask": ("CausalMask", "LocalMask", "FullMask", "MultiHeadMask"),
    "splash_attention_mask_info": ("process_mask", "process_mask_dkv"),
}


def _private() -> tuple[Any, ...]:  # modules of jax, with private functions
    found = []
    for name, members in _NAMES.items():
        try:
            module = importlib.import_module(f"{_PACKAGE}.{name}")
        except ImportError as error:
            raise ImportError(f"axcore-splash requires {_PACKAGE}.{name}, which jax {jax.__version__} lacks") from error
        if missing := [member for member in members if not hasattr(module, member)]:
            raise ImportError(
                f"axcore-splash requires {', '.join(missing)} in {_PACKAGE}.{name}, which jax {jax.__version__} lacks. "
                "Install jax 0.11.2."
            )
        found.append(module)
    return tuple(found)


_kernels, _masks, _infos = _private()

_UNSEEN = 1e30
"""The lse of padding, and of queries that see no key, in the backward pass: all their weights become 0."""
_NO_DOCUMENT = -1
"""The segment id of padding."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The static arguments of a call.

    Attributes:
        scale: multiplies the logits.
        causal: query i sees keys 0 to i.
        window: a query sees keys at most `window - 1` places away.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        blocks: block sizes.
        interpret: whether the Pallas interpreter runs the kernels, on a CPU.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    blocks: Blocks = Blocks()
    interpret: bool = False


Segments = tuple[Int[Array, "batch seq"], Int[Array, "batch kv_seq"]]
"""The segment ids of queries and of keys."""


def forward(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head value_dim"],
    segments: Segments | None = None,
    sinks: Float[Array, " head"] | None = None,
) -> tuple[Float[Array, "batch seq head value_dim"], Float32[Array, "batch head seq"]]:
    """softmax(scale q k^T) v, and the logarithm of the softmax's denominator."""
    seq, tile = q.shape[1], form.blocks.forward(q.shape[1], k.shape[1])
    call = _Call.of(form, tile, q, k, v, segments)
    info, function = call.mask()

    def row(q: Array, k: Array, v: Array, segments: Any) -> tuple[Array, Array]:
        heads, (lse,) = _kernels._splash_attention_forward(
            info,
            q,
            k,
            v,
            segments,
            sinks,
            is_mqa=False,
            block_sizes=_kernels.BlockSizes(block_q=tile.q, block_kv=tile.kv, block_kv_compute=tile.compute),
            residual_checkpoint_name=None,
            save_residuals=True,
            **_shared(form, function),
        )
        return heads, lse

    heads, lse = jax.vmap(row)(call.q, call.k, call.v, call.segments)
    return heads.transpose(0, 2, 1, 3)[:, :seq], lse[:, :, :seq]


def backward(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head value_dim"],
    lse: Float32[Array, "batch head seq"],
    delta: Float32[Array, "batch head seq"],
    heads_grad: Float[Array, "batch seq head value_dim"],
    segments: Segments | None = None,
) -> tuple[
    Float[Array, "batch seq head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
    Float[Array, "batch kv_seq kv_head value_dim"],
]:
    """Gradients of q, k and v: `p = exp(logits - lse)`, `dlogits = p * (heads_grad v^T - delta)`.

    Args:
        lse: may include keys that are not in `k`, and sinks.
        delta: the sum of `heads * heads_grad` over the features of each head.
    """
    lengths = q.shape[1], k.shape[1]
    lse = jnp.where(lse > _kernels.DEFAULT_MASK_VALUE / 2, lse, _UNSEEN)
    rest = lse, heads_grad, delta
    dq, dk, dv = _run_backward("dkv", form, form.blocks.dkv(*lengths), q, k, v, segments, *rest)
    if dq is None:
        dq = _run_backward("dq", form, form.blocks.dq(*lengths), q, k, v, segments, *rest)
    dq, dk, dv = (
        x.transpose(0, 2, 1, 3)[:, :length] for x, length in ((dq, lengths[0]), (dk, lengths[1]), (dv, lengths[1]))
    )
    return _scaled(dq, form.scale), dk, dv


def _run_backward(
    phase: str,
    form: Form,
    tile: Tile,
    q: Array,
    k: Array,
    v: Array,
    segments: Any,
    lse: Array,
    grad: Array,
    delta: Array,
) -> Any:
    """The kernel `dkv`, whose gradient of q is None unless it is fused, or the kernel `dq`."""
    call, layout = _Call.of(form, tile, q, k, v, segments), _kernels.QKVLayout.HEAD_DIM_MINOR
    fused = form.blocks.fused_backward
    info, function = call.mask(transposed=phase == "dkv", shrink=not fused)
    more: dict[str, Any] = {"bq": tile.q, "bkv": tile.kv}
    if phase == "dkv":
        more |= {"bkv_compute": tile.compute, "use_fused_bwd_kernel": fused}
    kernel = getattr(_kernels, f"_splash_attention_bwd_{phase}")

    def row(q: Array, k: Array, v: Array, segments: Any, lse: Array, grad: Array, delta: Array) -> Any:
        return kernel(
            q,
            k,
            v,
            segments,
            None,  # the gradient of the sinks is not computed in the kernel
            lse,
            grad,
            delta,
            is_mqa=False,
            mask_info=info,
            q_layout=layout,
            k_layout=layout,
            v_layout=layout,
            **more,
            **_shared(form, function),
        )

    lse, delta = (_pad(x, call.lengths[0], 2, value) for x, value in ((lse, _UNSEEN), (delta, 0.0)))
    grad = _pad(grad, call.lengths[0]).transpose(0, 2, 1, 3)
    return jax.vmap(row)(call.q, call.k, call.v, call.segments, lse, grad, delta)


def _shared(form: Form, function: Callable[..., Any] | None) -> dict[str, Any]:
    return {
        "mask_value": _kernels.DEFAULT_MASK_VALUE,
        "mask_function": function,
        "attn_logits_soft_cap": form.softcap,
        "interpret": form.interpret,
    }


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arrays of a kernel call, padded to blocks: [batch, head, seq, features]."""

    form: Form
    tile: Tile
    q: Array
    k: Array
    v: Array
    segments: Any
    lengths: tuple[int, int]

    @classmethod
    def of(cls, form: Form, tile: Tile, q: Array, k: Array, v: Array, segments: Segments | None) -> _Call:
        (batch, seq), key_len = q.shape[:2], k.shape[1]
        lengths = padded(seq, tile.q), padded(key_len, tile.kv)
        if form.causal or form.window is not None:  # every query of such a mask must see a key
            lengths = (padded(max(seq, key_len), math.lcm(tile.q, tile.kv)),) * 2
        if segments is None and lengths[1] > key_len and not form.causal:  # a causal mask hides padding
            segments = tuple(jnp.zeros((batch, length), jnp.int32) for length in (seq, key_len))
        ids = None
        if segments is not None:
            both = zip(segments, lengths, strict=True)
            ids = _kernels.SegmentIds(*(_pad(x.astype(jnp.int32), length, 1, _NO_DOCUMENT) for x, length in both))
        q, k, v = (
            _pad(x, length).transpose(0, 2, 1, 3)
            for x, length in ((_scaled(q, form.scale), lengths[0]), (k, lengths[1]), (v, lengths[1]))
        )
        return cls(form, tile, q, k, v, ids, lengths)

    def mask(self, transposed: bool = False, shrink: bool = True) -> tuple[Any, Callable[..., Any] | None]:
        """The blocks to compute, and the mask inside them."""
        return _mask(self.form.causal, self.form.window, self.lengths, (self.tile.q, self.tile.kv), transposed, shrink)


@functools.lru_cache(maxsize=128)
def _mask(
    causal: bool, window: int | None, lengths: tuple[int, int], block: tuple[int, int], transposed: bool, shrink: bool
) -> tuple[Any, Callable[..., Any] | None]:
    if window is not None:
        mask = _masks.LocalMask(lengths, (window - 1, 0 if causal else window - 1), 0)
    else:
        mask = _masks.CausalMask(lengths) if causal else _masks.FullMask(lengths)
    process, more = (_infos.process_mask_dkv, {"shrink_grid": shrink}) if transposed else (_infos.process_mask, {})
    info, function = process(_masks.MultiHeadMask([mask]), block, head_shards=1, q_seq_shards=1, **more)
    return info, function


def _scaled(x: Array, scale: float) -> Array:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def _pad(x: Array, length: int, axis: int = 1, value: float = 0) -> Array:
    widths = [(0, length - size if at == axis else 0) for at, size in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=value) if length > x.shape[axis] else x
