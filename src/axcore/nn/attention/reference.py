"""The reference kernel: every option, every view, any platform."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from axcore.config import at_least
from axcore.module import Rngs
from axcore.nn.attention.formula import attend, attend_in_blocks
from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.kernel import AttentionKernel
from axcore.nn.attention.request import OPTIONS
from axcore.nn.kv.views import Contiguous, KVView


class ReferenceKernel(AttentionKernel):
    """The formula as it stands, softmax in float32 (Vaswani et al. 2017, arXiv 1706.03762, eq. 1). Runs anywhere.

    Long rows are attended a chunk of queries at a time, so memory grows with `chunk * kv_seq`; the backward pass
    computes each chunk's logits again. Keys in a view other than plain arrays are read a block at a time.
    """

    class Config(AttentionKernel.Config):
        chunk: int | None = 1024
        """Queries that are attended at once; None: all."""
        block: int = 256
        """Keys that are read at once from a cache that does not hold them as plain arrays of one layer."""

    takes = frozenset(OPTIONS)
    views = (KVView,)
    local = False

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "chunk", "block")

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """See `AttentionKernel`. A query that sees no key gets finite numbers."""
        seq, chunk = inputs.q.shape[1], self.config.chunk
        if chunk is None or seq <= chunk:
            return self._attend(inputs)

        def split(x: jax.Array) -> jax.Array:  # [batch, seq, ...] -> [chunks, batch, chunk, ...]
            widths = [(0, -seq % chunk) if axis == 1 else (0, 0) for axis in range(x.ndim)]
            return rearrange(jnp.pad(x, widths, mode="edge"), "b (c s) ... -> c b s ...", s=chunk)

        def joined(x: jax.Array) -> jax.Array:
            return rearrange(x, "c b s ... -> b (c s) ...")[:, :seq]

        @jax.checkpoint
        def of_chunk(part: Any) -> tuple[Heads, LSE | None]:
            q, query = part
            return self._attend(inputs.replace(q=q, query=query))

        return jax.tree.map(joined, jax.lax.map(of_chunk, jax.tree.map(split, (inputs.q, inputs.query))))

    def _attend(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        if isinstance(inputs.kv, Contiguous):
            return attend(inputs)
        return attend_in_blocks(inputs, min(self.config.block, inputs.keys.shape[1]))
