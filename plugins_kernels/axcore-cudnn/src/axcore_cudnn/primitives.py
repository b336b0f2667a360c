"""Single calls of cuDNN attention: forward with the log-sum-exp, and backward from a given log-sum-exp.

`jax.nn.dot_product_attention` casts the log-sum-exp of cuDNN to the dtype of q and drops its gradient, so these
functions bind the primitives below it. The primitives are private to jax, so importing this module checks that they
exist. A call runs on one device: shard it with `axcore.parallel.shard_map`.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"


def private(*names: str) -> Any:  # a module of jax without type hints
    """The module, with these names.

    Raises:
        ImportError: it lacks one of them.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        raise ImportError(f"axcore-cudnn requires {_MODULE}, which jax {jax.__version__} lacks") from error
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise ImportError(
            f"axcore-cudnn requires {', '.join(missing)} in {_MODULE}, which jax {jax.__version__} lacks. "
            "Install jax 0.11.2."
        )
    return module


_cudnn = private("_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p", "MaskType", "AttentionLayout")


@dataclasses.dataclass(frozen=True)
class Form:
    """The static arguments of a call.

    Attributes:
        scale: multiplies the logits.
        causal: query i sees keys 0 to i.
        window: with `causal`: a query sees itself and the `window - 1` keys before it.
        documents: maximum number of documents per packed row, averaged over the batch, for the fast path (see
            `axcore_cudnn.packed`).
    """

    scale: float
    causal: bool = True
    window: int | None = None
    documents: int = 8


def forward(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head value_dim"],
    *,
    bias: Float[Array, "batch 1 seq kv_seq"] | None = None,
    lengths: tuple[Int32[Array, " batch"], Int32[Array, " batch"]] | None = None,
    documents: tuple[Int32[Array, "batch list"], Int32[Array, "batch list+1"]] | None = None,
) -> tuple[Float[Array, "batch seq head value_dim"], Float32[Array, "batch head seq"]]:
    """softmax(scale q k^T + bias) v, and the logarithm of the softmax's denominator.

    Args:
        bias: in the dtype of q. Requires an even `seq` and `kv_seq`.
        lengths: (number of queries, number of keys) of each row. Heads of later queries are undefined.
        documents: (lengths, offsets) of the documents, see `axcore_cudnn.ragged`. The lse is then
            [documents, head, seq], and undefined beyond the end of a document.
    """
    if q.shape[1] == k.shape[1] == 1:
        heads, lse = forward(form, _two(q), _two(k), _two(v), lengths=_ones(q))
        return heads[:, :1], lse[:, :, :1]
    operands, params = _arguments(form, q, k, bias, lengths, documents)
    heads, lse = call(_cudnn._dot_product_attention_fwd_p, q, k, v, *operands, is_training=True, **params)
    return heads, lse


def backward(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head value_dim"],
    heads: Float[Array, "batch seq head value_dim"],
    lse: Float32[Array, "batch head seq"],
    heads_grad: Float[Array, "batch seq head value_dim"],
    *,
    bias: Float[Array, "batch 1 seq kv_seq"] | None = None,
    lengths: tuple[Int32[Array, " batch"], Int32[Array, " batch"]] | None = None,
    documents: tuple[Int32[Array, "batch list"], Int32[Array, "batch list+1"]] | None = None,
) -> tuple[
    Float[Array, "batch seq head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
    Float[Array, "batch kv_seq kv_head value_dim"],
]:
    """Gradients of q, k and v, as in `axcore.nn.FusedAttention`. `heads` and `lse` may include keys not in `k`."""
    if q.shape[1] == k.shape[1] == 1:
        lse, grad = jnp.pad(lse, ((0, 0), (0, 0), (0, 1))), _two(heads_grad)
        dq, dk, dv = backward(form, _two(q), _two(k), _two(v), _two(heads), lse, grad, lengths=_ones(q))
        return dq[:, :1], dk[:, :1], dv[:, :1]
    operands, params = _arguments(form, q, k, bias, lengths, documents)
    arrays = (q, k, v, *operands, lse, heads, heads_grad)
    dq, dk, dv = call(_cudnn._dot_product_attention_bwd_p, *arrays, **params)
    return dq, dk, dv


def _two(x: Array) -> Array:
    """Appends one token: cuDNN does not support a single query with a single key."""
    return jnp.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)])


def _ones(q: Array) -> tuple[Array, Array]:
    return jnp.ones(q.shape[0], jnp.int32), jnp.ones(q.shape[0], jnp.int32)


def call(primitive: Any, *arrays: Array, **params: Any) -> Any:
    """Binds a primitive, sequentially under `jax.vmap`, for which the primitives have no rule."""
    return jax.custom_batching.sequential_vmap(lambda *arrays: tuple(primitive.bind(*arrays, **params)))(*arrays)


def _arguments(
    form: Form,
    q: Array,
    k: Array,
    bias: Array | None,
    lengths: tuple[Array, Array] | None,
    documents: tuple[Array, Array] | None,
) -> tuple[list[Array], dict[str, Any]]:
    kinds, unused = _cudnn.MaskType, jnp.zeros(0, q.dtype)
    if lengths is None and documents is None:
        kind = kinds.CAUSAL if form.causal else kinds.NO_MASK
    else:
        kind = kinds.PADDING_CAUSAL if form.causal else kinds.PADDING
    query_lengths, key_lengths = lengths or (unused, unused)
    query_offsets = key_offsets = unused
    if documents is not None:
        query_lengths = key_lengths = documents[0]
        # In elements, as cuDNN expects them.
        query_offsets, key_offsets = (documents[1] * (x.shape[2] * x.shape[3]) for x in (q, k))
    operands = [
        unused if bias is None else bias,
        query_lengths,
        key_lengths,
        query_offsets,
        key_offsets,
        unused,
        unused,
    ]
    params = {
        "scale": form.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),  # (has bias, has gradient of bias)
        "mask_type": kind,
        "layout": _cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": form.window,
    }
    return operands, params
