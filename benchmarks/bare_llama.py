"""The training step of a Llama in bare JAX: the same computation as the axcore recipes, without a framework.

`dispatch.py` and `step_vs_bare.py` compare axcore with it, and check that the losses agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, and how its step is compiled."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    vocab_size: int
    compute: Any = jnp.bfloat16
    attention: str = "reference"
    """`reference`, or `cudnn`: the attention function of axcore-cudnn, which supports packed rows."""
    unroll: int = 1
    saved: tuple[str, ...] | None = None
    """Names of the values that the backward pass keeps; None: all."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


def init(shape: Shape, key: jax.Array) -> dict[str, Any]:
    """Stacked float32 parameters with standard deviation 0.02."""
    dim, hidden, layers = shape.dim, shape.hidden_dim, shape.num_layers
    kv = shape.num_kv_heads * shape.head_dim
    sizes = {
        "embedding": (shape.vocab_size, dim),
        "head": (dim, shape.vocab_size),
        "query": (layers, dim, dim),
        "key": (layers, dim, kv),
        "value": (layers, dim, kv),
        "projection": (layers, dim, dim),
        "gate": (layers, dim, hidden),
        "up": (layers, dim, hidden),
        "down": (layers, hidden, dim),
    }
    keys = jax.random.split(key, len(sizes))
    params = {
        name: 0.02 * jax.random.normal(each, size, jnp.float32)
        for (name, size), each in zip(sizes.items(), keys, strict=True)
    }
    ones = {"attention_norm": (layers, dim), "ffn_norm": (layers, dim), "norm": (dim,)}
    return params | {name: jnp.ones(size) for name, size in ones.items()}


def loss(shape: Shape, params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy in nats."""
    cast = lambda name, weights: weights[name].astype(shape.compute)  # noqa: E731
    batch_size, seq = batch["inputs"].shape
    positions, segment_ids = batch["positions"], batch["segment_ids"]

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        return (x32 * jax.lax.rsqrt(variance + 1e-5) * scale).astype(shape.compute)

    def rope(x: jax.Array) -> jax.Array:
        half = shape.head_dim // 2
        rates = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angles = positions[:, :, None, None].astype(jnp.float32) * rates
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        h = norm(x, weights["attention_norm"]).reshape(-1, shape.dim)
        q = (h @ cast("query", weights)).reshape(batch_size, seq, shape.num_heads, shape.head_dim)
        k = (h @ cast("key", weights)).reshape(batch_size, seq, shape.num_kv_heads, shape.head_dim)
        v = (h @ cast("value", weights)).reshape(batch_size, seq, shape.num_kv_heads, shape.head_dim)
        q, k, v = checkpoint_name(rope(q), "query"), checkpoint_name(rope(k), "key"), checkpoint_name(v, "value")
        heads = checkpoint_name(_attend(shape, q, k, v, segment_ids), "heads").reshape(-1, shape.dim)
        x = x + (heads @ cast("projection", weights)).reshape(x.shape)
        h = norm(x, weights["ffn_norm"]).reshape(-1, shape.dim)
        gate, up = checkpoint_name(h @ cast("gate", weights), "gate"), checkpoint_name(h @ cast("up", weights), "up")
        return x + ((jax.nn.silu(gate) * up) @ cast("down", weights)).reshape(x.shape), None

    if shape.saved is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*shape.saved)
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=shape.unroll >= shape.num_layers)  # type: ignore[assignment]
    stacked = {name: value for name, value in params.items() if name not in ("embedding", "head", "norm")}
    x = cast("embedding", params)[batch["inputs"]]
    x, _ = jax.lax.scan(layer, x, stacked, unroll=shape.unroll)
    logits = (norm(x, params["norm"]).reshape(-1, shape.dim) @ cast("head", params)).astype(jnp.float32)
    logits = logits.reshape(batch_size, seq, -1)
    targets, weights = batch["targets"], batch["weights"]
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.where(weights == 0, 0.0, losses * weights).sum() / jnp.where(weights.sum() == 0, 1.0, weights.sum())


def _attend(shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Causal attention within documents, by cuDNN or in plain JAX (`reference`)."""
    if shape.attention == "cudnn":
        from axcore_cudnn.fused import Operands, attention
        from axcore_cudnn.primitives import Form

        return attention(Form(scale=1 / math.sqrt(shape.head_dim)), q, k, v, Operands(segment_ids))[0]
    batch_size, seq, _, head_dim = q.shape
    rows = q.reshape(batch_size, seq, shape.num_kv_heads, -1, head_dim)
    rows = rows.transpose(0, 2, 3, 1, 4).reshape(batch_size, shape.num_kv_heads, -1, head_dim)
    logits = jnp.einsum("bnqd,btnd->bnqt", rows, k, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    allowed = (jnp.arange(seq)[:, None] >= jnp.arange(seq)) & (segment_ids[:, :, None] == segment_ids[:, None])
    logits = logits.reshape(batch_size, shape.num_heads, seq, seq)
    logits = jnp.where(allowed[:, None], logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype).reshape(batch_size, shape.num_kv_heads, -1, seq)
    heads = jnp.einsum("bnqt,btnd->bnqd", weights, v).reshape(batch_size, shape.num_heads, seq, head_dim)
    return heads.transpose(0, 2, 1, 3)


def optimizer(params: dict[str, Any]) -> optax.GradientTransformation:
    """Clipping, Adam and decoupled weight decay, without the learning rate."""
    decays = {name: "norm" not in name for name in params}
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(0.1, mask=decays),
    )


def make_step(shape: Shape, transformation: optax.GradientTransformation) -> Callable[..., Any]:
    """(params, optimizer state, step, total steps, batch) -> the updated first four, and metrics."""

    def step(params: Any, state: Any, count: jax.Array, total: jax.Array, batch: dict[str, jax.Array]) -> Any:
        value, grads = jax.value_and_grad(lambda params: loss(shape, params, batch))(params)
        done = jnp.clip((count - 2000) / jnp.maximum(total - 2000, 1), 0.0, 1.0)
        falling = 0.1 + 0.9 * 0.5 * (1 + jnp.cos(jnp.pi * done))
        rate = (3e-4 * jnp.minimum((count + 1) / 2000, falling)).astype(jnp.float32)
        updates, state = transformation.update(grads, state, params)
        params = jax.tree.map(lambda param, update: param - rate * update, params, updates)
        return (
            params,
            state,
            count + 1,
            total,
            {"loss": value, "gradient_norm": optax.tree.norm(grads), "learning_rate": rate},
        )

    return step
