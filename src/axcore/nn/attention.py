"""Grouped-query attention, as a composition of children."""

from __future__ import annotations

import jax
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from axcore.config import REQUIRED, ConfigError, at_least
from axcore.module import Layer, Rngs
from axcore.nn.kernels import AttentionKernel, ReferenceKernel
from axcore.nn.linear import Linear
from axcore.nn.masks import Causal, Mask, SameSegment
from axcore.nn.matmul import rows
from axcore.nn.tokens import TokenInfo


class Attention(Layer):
    """Multi-head, grouped-query or multi-query attention (Ainslie et al. 2023, arXiv 2305.13245).

    Slots, empty unless a feature fills them:

    - `position`: `(q, k, query_positions, key_positions) -> (q, k)`, a position embedding such as RoPE;
    - `output`: `(x, heads) -> heads`, applied to the heads before they are projected.

    For remat policies the values `query`, `key`, `value` and `heads` are tagged.

    A child is offered `input_dim`, `num_heads`, `num_kv_heads` and `head_dim`, and takes those that it declares.
    """

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        num_heads: int = REQUIRED
        num_kv_heads: int | None = None
        """None: one for each head."""
        head_dim: int | None = None
        """None: input_dim / num_heads."""
        query: Linear.Config = Linear.Config()
        key: Linear.Config = Linear.Config()
        value: Linear.Config = Linear.Config()
        position: Layer.Config | None = None
        mask: Mask = Causal() & SameSegment()
        kernel: AttentionKernel.Config = ReferenceKernel.Config()
        output: Layer.Config | None = None
        projection: Linear.Config = Linear.Config()

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "input_dim", "num_heads", "num_kv_heads", "head_dim")
        num_kv_heads = cfg.num_kv_heads or cfg.num_heads
        if cfg.num_heads % num_kv_heads:
            raise ConfigError(f"num_heads={cfg.num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
        if cfg.head_dim is None and cfg.input_dim % cfg.num_heads:
            raise ConfigError(f"input_dim={cfg.input_dim} is not a multiple of num_heads={cfg.num_heads}; set head_dim")
        self.head_dim = cfg.head_dim or cfg.input_dim // cfg.num_heads
        widths = {
            "input_dim": cfg.input_dim,
            "num_heads": cfg.num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": self.head_dim,
        }

        def into_heads(name: str, count: int) -> Linear:
            wide = {"input_dim": cfg.input_dim, "output_dim": count * self.head_dim}
            return self.child(name, getattr(cfg, name), rngs, **wide, axes=("embed", "heads"))

        self.query = into_heads("query", cfg.num_heads)
        self.key = into_heads("key", num_kv_heads)
        self.value = into_heads("value", num_kv_heads)
        self.position = self.child("position", cfg.position, rngs, **widths)
        self.kernel = self.child("kernel", cfg.kernel, rngs, **widths)
        self.output = self.child("output", cfg.output, rngs, **widths)
        wide = {"input_dim": cfg.num_heads * self.head_dim, "output_dim": cfg.input_dim}
        self.projection = self.child("projection", cfg.projection, rngs, **wide, axes=("heads", "embed"))

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape."""
        flat, shape = rows(x), (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(flat).reshape(shape) for project in (self.query, self.key, self.value))
        if self.position is not None:
            q, k = self.position(q, k, tokens.positions, tokens.positions)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        heads = checkpoint_name(self.kernel(q, k, v, self.config.mask, tokens, tokens), "heads")
        if self.output is not None:
            heads = self.output(x, heads)
        return self.projection(rearrange(heads, "b s n d -> b s (n d)"))
