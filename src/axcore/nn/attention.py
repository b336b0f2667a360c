"""Grouped-query attention, as a composition of children."""

from __future__ import annotations

import jax
from einops import rearrange
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from axcore.config import REQUIRED, ConfigError, at_least
from axcore.module import Layer, Rngs
from axcore.nn.initializers import Initializer
from axcore.nn.kernel_choice import attend
from axcore.nn.kernels import AttentionKernel, ReferenceKernel
from axcore.nn.kv_cache import KVCache
from axcore.nn.linear import Linear
from axcore.nn.masks import Causal, Mask, SameSegment
from axcore.nn.matmul import rows
from axcore.nn.tokens import TokenInfo


class Attention(Layer):
    """Multi-head, grouped-query or multi-query attention (Ainslie et al. 2023, arXiv 2305.13245).

    Slots, empty unless a feature fills them:

    - `position`: `(q, k, query_positions, key_positions) -> (q, k)`, a position embedding such as RoPE; k is None where
      attention has no keys of its own;
    - `cache`: `(q, k, v, mask, tokens, attend) -> heads`, keeps keys and values, or brings them (see `KVCache`);
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
        key: Linear.Config | None = Linear.Config()
        """None, together with `value`: the cache slot brings keys and values."""
        value: Linear.Config | None = Linear.Config()
        position: Layer.Config | None = None
        cache: KVCache.Config | None = None
        mask: Mask = Causal() & SameSegment()
        kernel: AttentionKernel.Config = ReferenceKernel.Config()
        scale: float | None = None
        """Of the logits; None: 1 / sqrt(head_dim)."""
        softcap: float | None = None
        """Bounds the logits smoothly, see `AttentionKernel`; None leaves them."""
        sinks: Initializer | None = None
        """Given: each head learns the logit of a key that every query sees and that has no value."""
        output: Layer.Config | None = None
        projection: Linear.Config = Linear.Config()

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> Attention.Config:
            return self if self.cache is not None else self.set(cache=cache)

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

        if (cfg.key is None) != (cfg.value is None) or (cfg.key is None and cfg.cache is None):
            raise ConfigError("key and value are given both or neither; with neither, cache must bring them")
        if cfg.softcap is not None and not cfg.softcap > 0:
            raise ConfigError(f"softcap must be positive or None, not {cfg.softcap}")

        def into_heads(name: str, count: int) -> Linear:
            wide = {"input_dim": cfg.input_dim, "output_dim": count * self.head_dim}
            return self.child(name, getattr(cfg, name), rngs, **wide, axes=("embed", "heads"))

        self.query = into_heads("query", cfg.num_heads)
        self.key = into_heads("key", num_kv_heads)
        self.value = into_heads("value", num_kv_heads)
        self.sinks = nnx.data(None)
        if cfg.sinks is not None:
            self.sinks = self.param("sinks", (cfg.num_heads,), cfg.sinks, rngs, axes=("heads",))
        self.position = self.child("position", cfg.position, rngs, **widths)
        self.cache = self.child("cache", cfg.cache, rngs, **widths)
        self.kernel = self.child("kernel", cfg.kernel, rngs, **widths)
        self.output = self.child("output", cfg.output, rngs, **widths)
        wide = {"input_dim": cfg.num_heads * self.head_dim, "output_dim": cfg.input_dim}
        self.projection = self.child("projection", cfg.projection, rngs, **wide, axes=("heads", "embed"))

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape."""
        flat, shape = rows(x), (*x.shape[:2], -1, self.head_dim)
        q = self.query(flat).reshape(shape)
        k, v = (None if each is None else each(flat).reshape(shape) for each in (self.key, self.value))
        if self.position is not None:
            q, k = self.position(q, k, tokens.positions, tokens.positions)
        q = checkpoint_name(q, "query")
        if k is not None:
            k, v = checkpoint_name(k, "key"), checkpoint_name(v, "value")
        mask = self.config.mask
        if self.cache is None:
            heads = self._attend(q, k, v, mask, tokens, tokens)
        else:
            heads = self.cache(q, k, v, mask, tokens, self._attend)
        heads = checkpoint_name(heads, "heads")
        if self.output is not None:
            heads = self.output(x, heads)
        return self.projection(rearrange(heads, "b s n d -> b s (n d)"))

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, query: TokenInfo, key: TokenInfo
    ) -> jax.Array:
        cfg, sinks = self.config, None if self.sinks is None else self.sinks[...]
        return attend(self.kernel, q, k, v, mask, query, key, scale=cfg.scale, softcap=cfg.softcap, sinks=sinks)
