"""Attention that never holds all logits of a query at once.

The softmax is computed online (Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3): keys come in blocks, and
what was summed up so far is rescaled whenever a larger logit appears.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

import axcore as ax
from axcore.nn import AttentionKernel, KernelRequest, Mask, TokenInfo, visible

LOWEST = float(jnp.finfo(jnp.float32).min)
"""The logit of what a query does not see. It is finite, or a block without any visible key would give NaN."""


class BlockKernel(AttentionKernel):
    """Exact attention, a block of keys at a time; sums are float32.

    Logits take `query_len * block` instead of `query_len * key_len`, in the backward pass as well, which computes them
    again. The backward pass also keeps the sums after each block.
    """

    class Config(AttentionKernel.Config):
        block: int = 512
        """Keys that are attended to at once."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs  # no parameters
        ax.at_least(cfg, 1, "block")

    def supports(self, request: KernelRequest) -> str | None:
        """None if this kernel can do it; else why not, so that another one can be chosen."""
        return "its sums are float32, too coarse for float64" if request.dtype == jnp.float64 else None

    def __call__(  # type: ignore[override] # without softcap and sinks: it is never asked for what it does not take
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Mask,
        query: TokenInfo,
        key: TokenInfo,
        *,
        scale: float | None = None,
    ) -> jax.Array:
        """[batch, seq, head, head_dim], as `axcore.nn.AttentionKernel` says."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        seq = q.shape[1]
        # The heads that share keys are rows of one product, and k and v need no copy for each.
        q = rearrange(q, "b s (n g) d -> b n g s d", n=k.shape[2])
        exists = jnp.ones(key.index.shape, bool) if key.valid is None else key.valid

        def step(sums: Any, block: Any) -> tuple[Any, None]:
            highest, total, out = sums
            k, v, key = block
            logits = scale * jnp.einsum("bngsd,btnd->bngst", q, k, preferred_element_type=jnp.float32)
            logits = jnp.where(visible(mask, query, key)[:, None, None], logits, LOWEST)
            # Any number could be subtracted inside the exponentials; no gradient passes through the choice.
            now = jax.lax.stop_gradient(jnp.maximum(highest, logits.max(-1)))
            weights, shrink = jnp.exp(logits - now[..., None]), jnp.exp(highest - now)
            seen = jnp.einsum("bngst,btnd->bngsd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return (now, total * shrink + weights.sum(-1), out * shrink[..., None] + seen), None

        rows = q.shape[:-1]
        nothing = jnp.full(rows, LOWEST), jnp.zeros(rows), jnp.zeros((*rows, v.shape[-1]))
        blocks = jax.tree.map(self._split, (k, v, dataclasses.replace(key, valid=exists)))
        (_, total, out), _ = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), nothing, blocks)
        return rearrange(out / total[..., None], "b n g s d -> b s (n g) d", s=seq).astype(v.dtype)

    def _split(self, x: jax.Array) -> jax.Array:
        """[batch, kv_seq, ...] -> [blocks, batch, block, ...]. What fills up the last block is no valid token."""
        size = min(self.config.block, x.shape[1])
        widths = [(0, -x.shape[1] % size) if axis == 1 else (0, 0) for axis in range(x.ndim)]
        return rearrange(jnp.pad(x, widths), "b (c t) ... -> c b t ...", t=size)
