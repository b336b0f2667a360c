"""Differential attention (Ye et al. 2024, arXiv 2410.05258): the weighted difference of two attention maps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange, repeat

import axcore as ax
from axcore.config import has_field
from axcore.nn import (
    Attention,
    AttentionInputs,
    AttentionKernel,
    Contiguous,
    Heads,
    Initializer,
    KernelRequest,
    Normal,
    ReferenceKernel,
    RMSNorm,
    attend,
    refusal,
)


class DiffAttention(AttentionKernel):
    """`(softmax(q1 k1^T) - lambda softmax(q2 k2^T)) v` for each pair of heads, followed by a norm (eq. 1 to 3).

    Key-value heads 2j and 2j + 1 are k1 and k2 of pair j. Their concatenated values are v, which is twice as wide. The
    query heads of k1 are q1, those of k2 are q2, in the same order. The attention layer keeps its projections, position
    embedding and KV cache, and its output has half as many heads, each twice as wide. Without grouped queries, the
    order of heads matches the authors' code.

    Each layer has one `lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init` and reports it
    as the summary `lambda`.
    """

    class Config(AttentionKernel.Config):
        layout_fields = ("kernel",)
        num_heads: ax.PositiveInt = ax.REQUIRED
        num_kv_heads: ax.PositiveInt = ax.REQUIRED
        kernel: AttentionKernel.Config = ReferenceKernel.Config()
        """Computes the softmax attention of all heads. Called once for each half of v."""
        lambda_init: ax.Fraction = 0.8
        """The same in every layer, as a scanned stack requires. The paper also lets it grow with depth."""
        init: Initializer = Normal(stddev=0.1)
        """Initializer of the four vectors of lambda."""
        norm: ax.Layer.Config = RMSNorm.Config()
        """Norm of each head, over its `2 head_dim` features."""

    takes = frozenset({"softcap", "sinks", "bias", "dropout"})
    local = False  # only the inner kernel is sharded; this one sees all heads

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        if cfg.num_kv_heads % 2:
            raise ax.ConfigError(
                f"differential attention pairs key-value heads, so num_kv_heads must be even, not {cfg.num_kv_heads}"
            )
        widths = {"num_heads": cfg.num_heads, "num_kv_heads": cfg.num_kv_heads, "head_dim": cfg.head_dim}
        self.kernel = self.child("kernel", cfg.kernel, rngs, **widths)
        vector = (cfg.head_dim,)
        self.lambda_q1 = self.param("lambda_q1", vector, cfg.init, rngs, axes=(None,))
        self.lambda_k1 = self.param("lambda_k1", vector, cfg.init, rngs, axes=(None,))
        self.lambda_q2 = self.param("lambda_q2", vector, cfg.init, rngs, axes=(None,))
        self.lambda_k2 = self.param("lambda_k2", vector, cfg.init, rngs, axes=(None,))
        self.norm = self.child("norm", cfg.norm, rngs, input_dim=2 * cfg.head_dim, axes=(None,))

    def supports(self, request: KernelRequest) -> str | None:
        """Delegates to the inner kernel."""
        return refusal(self.kernel, request)

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, None]:
        """See `axcore.nn.AttentionKernel`. Heads 2i and 2i + 1 of the result are the halves of one wide head."""
        kv, pairs = inputs.plain, self.config.num_kv_heads // 2
        halves = []
        for half in range(2):
            values = repeat(kv.v[:, :, half::2], "b t pair d -> b t (pair two) d", two=2)
            heads, _ = attend(self.kernel, inputs.replace(kv=Contiguous(kv.k, values, kv.tokens)))
            halves.append(rearrange(heads, "b s (pair map group) d -> map b s (pair group) d", pair=pairs, map=2))
        first, second = jnp.concatenate(halves, axis=-1).astype(jnp.float32)
        share = self._lambda()
        if inputs.phase == "train":  # a decoding call may run the kernel for several blocks of rows
            self.add_summary("lambda", share)
        heads = self.norm(first - share * second) * (1 - self.config.lambda_init)
        return rearrange(heads, "b s head (two d) -> b s (head two) d", two=2).astype(inputs.q.dtype), None

    def _lambda(self) -> jax.Array:
        """float32 scalar."""
        q1, k1, q2, k2 = (
            each[...].astype(jnp.float32) for each in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        )
        return jnp.exp(q1 @ k1) - jnp.exp(q2 @ k2) + self.config.lambda_init


def use_diff_attention(cfg: ax.Config, lambda_init: float = 0.8, where: ax.Where = Attention) -> ax.Config:
    """Makes every selected attention differential. The attention's previous kernel computes both softmax attentions.

    Args:
        lambda_init: approximate initial value of lambda.
        where: which attentions.
    """

    def wrap(_: str, attention: Any) -> ax.Config:
        if not has_field(attention, "kernel"):
            raise ax.ConfigError("only attentions with a kernel slot can be made differential")
        if isinstance(attention.kernel, DiffAttention.Config):
            raise ax.ConfigError("the attention is already differential. To change it, set kernel.lambda_init.")
        return attention.set(kernel=DiffAttention.Config(kernel=attention.kernel, lambda_init=lambda_init))

    return ax.select(cfg, where).map(wrap)
