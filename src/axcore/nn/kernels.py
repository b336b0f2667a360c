"""Attention kernels: softmax(q k^T) v under a mask."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from einops import rearrange

from axcore.config import REQUIRED
from axcore.module import Layer
from axcore.nn.masks import Mask
from axcore.nn.tokens import TokenInfo


class AttentionKernel(Layer):
    """Base of the layers that fill attention's kernel slot."""

    class Config(Layer.Config):
        head_dim: int = REQUIRED

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, query: TokenInfo, key: TokenInfo
    ) -> jax.Array:
        """Attends.

        Args:
            q: [batch, seq, head, head_dim].
            k, v: [batch, kv_seq, kv_head, head_dim]; each kv head serves `head / kv_head` consecutive heads.
            mask: which keys a query may see. A query that sees none gets a mean over all keys.
            query, key: where the tokens of q and of k stand.

        Returns:
            [batch, seq, head, head_dim] in the dtype of q.
        """
        raise NotImplementedError


class ReferenceKernel(AttentionKernel):
    """The formula as it stands, softmax in float32 (Vaswani et al. 2017, arXiv 1706.03762, eq. 1). Runs anywhere."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, query: TokenInfo, key: TokenInfo
    ) -> jax.Array:
        batch, seq, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[2]
        # The heads that share keys are rows of one product: one batched matrix product, and no copy of k and v.
        rows = rearrange(q / math.sqrt(head_dim), "b s (n g) d -> b n (g s) d", n=num_kv_heads)
        logits = jnp.einsum("bnqd,btnd->bnqt", rows, k, preferred_element_type=jnp.float32)
        logits = logits.reshape(batch, num_heads, seq, -1)
        allowed = mask.allowed(query, key)[:, None]
        weights = jax.nn.softmax(jnp.where(allowed, logits, jnp.finfo(jnp.float32).min), axis=-1)
        weights = weights.astype(v.dtype).reshape(batch, num_kv_heads, -1, k.shape[1])
        out = jnp.einsum("bnqt,btnd->bnqd", weights, v)
        return rearrange(out, "b n (g s) d -> b s (n g) d", s=seq)
