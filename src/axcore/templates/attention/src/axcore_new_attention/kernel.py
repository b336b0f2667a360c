"""Attention that never stores all logits of a query at once.

The softmax is computed online (Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3): keys are processed in
blocks, and the running sums are rescaled whenever a larger logit appears.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

import axcore as ax
from axcore.nn import LSE, AttentionInputs, AttentionKernel, Heads, KernelRequest, visible

LOWEST = float(jnp.finfo(jnp.float32).min)
"""The logit of masked keys. It is finite, since a block without visible keys would otherwise give NaN."""


class BlockKernel(AttentionKernel):
    """Exact attention, one block of keys at a time, with float32 sums.

    The logits take memory for `query_len * block` instead of `query_len * key_len` numbers, also in the backward pass,
    which recomputes them. The sums after each block are stored for the backward pass.
    """

    class Config(AttentionKernel.Config):
        block: ax.PositiveInt = 512
        """Number of keys per block."""

    takes = frozenset({"lse"})  # but not softcap, sinks, bias or dropout

    config: Config

    def supports(self, request: KernelRequest) -> str | None:
        """None if the kernel supports the request, otherwise the reason."""
        return "its float32 sums are too coarse for float64" if request.dtype == jnp.float64 else None

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """See `axcore.nn.AttentionKernel`."""
        kv, seq = inputs.plain, inputs.q.shape[1]
        # Query heads that share a kv head become rows of one matrix product, so k and v are not repeated.
        q = rearrange(inputs.q, "b s (n g) d -> b n g s d", n=kv.k.shape[2])
        exists = jnp.ones(kv.tokens.index.shape, bool) if kv.tokens.valid is None else kv.tokens.valid

        def step(sums: Any, block: Any) -> tuple[Any, None]:
            highest, total, out = sums
            k, v, key = block
            logits = inputs.scale * jnp.einsum("bngsd,btnd->bngst", q, k, preferred_element_type=jnp.float32)
            logits = jnp.where(visible(inputs.mask, inputs.query, key)[:, None, None], logits, LOWEST)
            # The subtracted number does not change the result, so no gradient passes through it.
            now = jax.lax.stop_gradient(jnp.maximum(highest, logits.max(-1)))
            weights, shrink = jnp.exp(logits - now[..., None]), jnp.exp(highest - now)
            seen = jnp.einsum("bngst,btnd->bngsd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return (now, total * shrink + weights.sum(-1), out * shrink[..., None] + seen), None

        rows = q.shape[:-1]
        nothing = jnp.full(rows, LOWEST), jnp.zeros(rows), jnp.zeros((*rows, kv.v.shape[-1]))
        blocks = jax.tree.map(self._split, (kv.k, kv.v, dataclasses.replace(kv.tokens, valid=exists)))
        (highest, total, out), _ = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), nothing, blocks)
        heads = rearrange(out / total[..., None], "b n g s d -> b s (n g) d", s=seq).astype(kv.v.dtype)
        if not inputs.return_lse:
            return heads, None
        return heads, rearrange(jax.lax.stop_gradient(highest + jnp.log(total)), "b n g s -> b s (n g)")

    def _split(self, x: jax.Array) -> jax.Array:
        """[batch, kv_seq, ...] -> [blocks, batch, block, ...]. Padding in the last block is marked as invalid."""
        size = min(self.config.block, x.shape[1])
        widths = [(0, -x.shape[1] % size) if axis == 1 else (0, 0) for axis in range(x.ndim)]
        return rearrange(jnp.pad(x, widths), "b (c t) ... -> c b t ...", t=size)
