"""Multi-head, grouped-query and multi-query attention."""

from __future__ import annotations

import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from axcore.config import ConfigError, PositiveInt
from axcore.module import Layer, Rngs
from axcore.nn.attention.base import BaseAttention, Hidden
from axcore.nn.fusing import Fusion
from axcore.nn.kv.cache import sized
from axcore.nn.linear import Linear
from axcore.nn.matmul import rows
from axcore.nn.tokens import TokenInfo
from axcore.parallel import constrain

Projected = Float[Array, "batch seq head head_dim"]


class Attention(BaseAttention):
    """Multi-head, grouped-query or multi-query attention (Ainslie et al. 2023, arXiv 2305.13245).

    In addition to the slots of `BaseAttention`, it has `query_norm` and `key_norm`: `heads -> heads`, each [batch, seq,
    head, head_dim], applied before the position embedding (Henry et al. 2020, arXiv 2010.04245). Both receive
    `head_dim` as `input_dim`.
    """

    class Config(BaseAttention.Config):
        num_kv_heads: PositiveInt | None = None
        """Number of kv heads; None: num_heads."""
        head_dim: PositiveInt | None = None
        """Features of a head; None: input_dim / num_heads."""
        query: Linear.Config | None = Linear.Config()
        key: Linear.Config | None = Linear.Config()
        """Projection of the keys. `key` and `value` are None if the cache provides keys and values."""
        value: Linear.Config | None = Linear.Config()
        qkv: Linear.Config | None = None
        """One fused projection that replaces the other three, which must then be None. Its columns are grouped by kv
        head (queries, key, value), so tensor parallelism can split it between kv heads."""
        query_norm: Layer.Config | None = None
        key_norm: Layer.Config | None = None

        def fusion(self) -> Fusion | None:
            """Computes queries, keys and values in one product. None: they are not equal, or fused already."""
            if self.query is None or not self.query == self.key == self.value:
                return None
            fused = self.set(qkv=self.query, query=None, key=None, value=None)
            return Fusion(fused, ("query", "key", "value"), "qkv", self.num_kv_heads or self.num_heads)

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        num_kv_heads = cfg.num_kv_heads or cfg.num_heads
        if cfg.num_heads % num_kv_heads:
            divisors = ", ".join(str(count) for count in range(1, cfg.num_heads + 1) if cfg.num_heads % count == 0)
            raise ConfigError(
                f"num_heads={cfg.num_heads} is not a multiple of num_kv_heads={num_kv_heads}. Set num_kv_heads to "
                f"one of {divisors}"
            )
        if cfg.head_dim is None and cfg.input_dim % cfg.num_heads:
            raise ConfigError(f"input_dim={cfg.input_dim} is not a multiple of num_heads={cfg.num_heads}; set head_dim")
        _check_projections(cfg)
        self.head_dim = cfg.head_dim or cfg.input_dim // cfg.num_heads

        def into_heads(name: str, count: int, axis: str) -> Linear:
            widths = {"input_dim": cfg.input_dim, "output_dim": count * self.head_dim}
            return self.child(name, getattr(cfg, name), rngs, **widths, axes=("embed", axis))

        self.query = into_heads("query", cfg.num_heads, "head")
        self.key = into_heads("key", num_kv_heads, "kv_head")
        self.value = into_heads("value", num_kv_heads, "kv_head")
        self.qkv = into_heads("qkv", cfg.num_heads + 2 * num_kv_heads, "kv_head")
        of_head = {"input_dim": self.head_dim, "head_dim": self.head_dim, "axes": (None,)}
        self.query_norm = self.child(
            "query_norm", cfg.query_norm, rngs, num_heads=cfg.num_heads, head_axis="head", **of_head
        )
        self.key_norm = self.child(
            "key_norm", cfg.key_norm, rngs, num_heads=num_kv_heads, head_axis="kv_head", **of_head
        )
        self.make_slots(rngs, num_kv_heads=num_kv_heads, head_dim=self.head_dim)
        widths = {"input_dim": cfg.input_dim, "num_heads": cfg.num_heads, "num_kv_heads": num_kv_heads}
        widths |= {"head_dim": self.head_dim, "value_dim": self.head_dim}
        self.cache = self.child("cache", sized(cfg.cache), rngs, **widths)

    def __call__(self, x: Hidden, tokens: TokenInfo) -> Hidden:
        """Computes attention and the output projection."""
        q, k, v = self._queries_keys_values(x)
        if self.query_norm is not None:
            q = self.query_norm(q)
        if self.key_norm is not None and k is not None:
            k = self.key_norm(k)
        q = constrain(q, "batch", "seq", "head", None)
        if k is not None and v is not None:
            k, v = (constrain(each, "batch", "seq", "kv_head", None) for each in (k, v))
        q, k = self.positioned(q, k, tokens)
        q = checkpoint_name(constrain(q, "batch", "seq", "head", None), "query")
        if k is not None and v is not None:
            k = checkpoint_name(constrain(k, "batch", "seq", "kv_head", None), "key")
            v = checkpoint_name(constrain(v, "batch", "seq", "kv_head", None), "value")
        return self.project(x, self.heads(q, k, v, tokens))

    def _queries_keys_values(self, x: Hidden) -> tuple[Projected, Projected | None, Projected | None]:
        """Projects the input to q, k and v. k and v are None if the cache provides them."""
        flat, shape = rows(x), (*x.shape[:2], -1, self.head_dim)
        if self.qkv is None:
            k, v = (None if each is None else each(flat).reshape(shape) for each in (self.key, self.value))
            return self.query(flat).reshape(shape), k, v
        group = self.config.num_heads // (self.config.num_kv_heads or self.config.num_heads)
        heads = rearrange(self.qkv(flat).reshape(shape), "b s (n g) d -> b s n g d", g=group + 2)
        q, k, v = jnp.split(heads, (group, group + 1), axis=3)
        return rearrange(q, "b s n g d -> b s (n g) d"), k[..., 0, :], v[..., 0, :]


def _check_projections(cfg: Attention.Config) -> None:
    """Raises a ConfigError unless the projections compute queries, keys and values exactly once."""
    separate = [name for name in ("query", "key", "value") if getattr(cfg, name) is not None]
    if cfg.qkv is not None and separate:
        raise ConfigError(f"qkv computes queries, keys and values in one product; set {', '.join(separate)} to None")
    if cfg.qkv is None and cfg.query is None:
        raise ConfigError(
            "query and qkv are both None; set query, or set qkv to compute queries, keys and values in one product"
        )
    if cfg.qkv is None and len(separate) < 3 and (len(separate) == 2 or cfg.cache is None):
        raise ConfigError("key and value must both be set, or both be None with a cache that provides keys and values")
