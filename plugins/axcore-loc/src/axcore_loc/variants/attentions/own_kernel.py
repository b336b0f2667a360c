"""A custom kernel: logits decrease with the distance."""

import jax
import jax.numpy as jnp

from axcore.nn import Attention, AttentionInputs, AttentionKernel, Heads


class Receding(AttentionKernel):
    """Subtracts the distance times a slope per head from the logits (ALiBi, arXiv 2108.12409, section 3)."""

    local = False  # the slopes depend on all heads

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, None]:
        q, kv, query, key = inputs.q, inputs.plain, inputs.query, inputs.plain.tokens
        groups = q.shape[2] // kv.k.shape[2]
        k, v = jnp.repeat(kv.k, groups, axis=2), jnp.repeat(kv.v, groups, axis=2)
        slopes = 2.0 ** -jnp.linspace(1, 8, q.shape[2])
        distance = query.index[:, None, :, None] - key.index[:, None, None, :]
        logits = jnp.einsum("bqnd,bknd->bnqk", q, k) * inputs.scale - slopes[:, None, None] * distance
        weights = jax.nn.softmax(jnp.where(inputs.mask.allowed(query, key)[:, None], logits, -1e9), axis=-1)
        return jnp.einsum("bnqk,bknd->bqnd", weights.astype(v.dtype), v), None


def attention() -> Attention.Config:
    return Attention.Config(num_heads=4, num_kv_heads=2, kernel=Receding.Config())
