"""The reference kernel, which supports every option and view on every platform."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
from einops import rearrange

from axcore.config import PositiveInt
from axcore.nn.attention.formula import blockwise_attention, dense_attention
from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.kernel import AttentionKernel
from axcore.nn.attention.request import OPTIONS
from axcore.nn.kv.views import Contiguous, KVView
from axcore.nn.tokens import TokenInfo


class ReferenceKernel(AttentionKernel):
    """The attention formula with a float32 softmax (Vaswani et al. 2017, arXiv 1706.03762, eq. 1).

    Queries are processed in chunks, so memory grows with `chunk * kv_seq`; the backward pass recomputes the logits of
    each chunk. Views other than `Contiguous` are read a block of keys at a time.
    """

    class Config(AttentionKernel.Config):
        chunk: PositiveInt | None = 1024
        """Number of queries processed at once; None: all."""
        block: PositiveInt = 256
        """Number of keys read at once from a view that is not `Contiguous`."""

    takes = frozenset(OPTIONS)
    views = (KVView,)
    local = False
    uses_dtypes = False

    config: Config

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """See `AttentionKernel`. The heads of a query that sees no key are finite."""
        seq, chunk = inputs.q.shape[1], self.config.chunk
        is_symbolic = jax.export.is_symbolic_dim(seq)
        if chunk is None or (not is_symbolic and seq <= chunk):
            return self._attend(inputs)
        # JAX can prove that this many chunks hold a symbolic length, but not that -(-seq // chunk) do.
        count = seq // chunk + 1 if is_symbolic else -(-seq // chunk)
        is_whole = not is_symbolic and seq % chunk == 0

        def split(x: jax.Array) -> jax.Array:  # [batch, seq, ...] -> [chunks, batch, chunk, ...]
            if not is_whole:  # even a padding of no width makes XLA send rows between devices
                widths = [(0, count * chunk - seq) if axis == 1 else (0, 0) for axis in range(x.ndim)]
                x = jnp.pad(x, widths, mode="edge")
            return rearrange(x, "b (c s) ... -> c b s ...", c=count, s=chunk)

        def joined(x: jax.Array) -> jax.Array:
            return rearrange(x, "c b s ... -> b (c s) ...")[:, :seq]

        @jax.checkpoint
        def of_chunk(part: tuple[jax.Array, TokenInfo]) -> tuple[Heads, LSE | None]:
            q, query = part
            return self._attend(inputs.replace(q=q, query=query))

        return jax.tree.map(joined, jax.lax.map(of_chunk, jax.tree.map(split, (inputs.q, inputs.query))))

    def _attend(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        if isinstance(inputs.kv, Contiguous):
            return dense_attention(inputs)
        return blockwise_attention(inputs, min(self.config.block, inputs.keys.shape[1]))
