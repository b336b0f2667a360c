"""A kernel of its own: logits fall with the distance."""

from typing import Any

import jax
import jax.numpy as jnp

from axcore.nn import Attention, AttentionKernel, Mask, TokenInfo


class Receding(AttentionKernel):
    """Logits less the distance times a slope for each head (ALiBi, arXiv 2108.12409, section 3)."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, query: TokenInfo, key: TokenInfo, **options: Any
    ) -> jax.Array:
        groups = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
        slopes = 2.0 ** -jnp.linspace(1, 8, q.shape[2])
        distance = query.index[:, None, :, None] - key.index[:, None, None, :]
        logits = jnp.einsum("bqnd,bknd->bnqk", q, k) / q.shape[3] ** 0.5 - slopes[:, None, None] * distance
        weights = jax.nn.softmax(jnp.where(mask.allowed(query, key)[:, None], logits, -1e9), axis=-1)
        return jnp.einsum("bnqk,bknd->bqnd", weights.astype(v.dtype), v)


def attention() -> Attention.Config:
    return Attention.Config(num_heads=4, num_kv_heads=2, kernel=Receding.Config())
