"""Multi-head latent attention."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axcore.config import REQUIRED, ConfigError, NonNegativeInt, PositiveInt, has_field
from axcore.module import Layer, Rngs
from axcore.nn.attention.base import BaseAttention, Hidden
from axcore.nn.attention.inputs import AttentionInputs, Heads, isolate_nan
from axcore.nn.kv.cache import sized
from axcore.nn.kv.views import Contiguous, Latent, empty_values
from axcore.nn.linear import Linear
from axcore.nn.matmul import rows
from axcore.nn.norm import RMSNorm
from axcore.nn.tokens import TokenInfo
from axcore.parallel import constrain


class LatentAttention(BaseAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, eq. 9-19): the keys and values of all heads are
    projected from one latent vector per token.

    Queries and keys have `qk_nope_head_dim` features without a position embedding, followed by `qk_rope_head_dim`
    features with one; the latter are shared by the keys of all heads. The `position` slot receives `qk_rope_head_dim`
    as `head_dim`.

    The cache stores the latent and the shared key features as one key of `kv_lora_rank + qk_rope_head_dim` features,
    without a value, so its config must have the field `value_dim`. With a cache, rows of at most `absorb_up_to` new
    tokens attend to the latents, with `key_up` and `value_up` absorbed into queries and heads (section 2.1.2); for
    longer rows, the latents are first expanded to keys and values.
    """

    class Config(BaseAttention.Config):
        kv_lora_rank: PositiveInt = REQUIRED
        """Features of the latent vector."""
        q_lora_rank: PositiveInt | None = None
        """Features of the latent vector of the queries; None: queries are projected from the input."""
        qk_nope_head_dim: PositiveInt = 128
        """Features of a query or key without a position embedding."""
        qk_rope_head_dim: PositiveInt = 64
        """Features of a query or key with a position embedding."""
        value_dim: PositiveInt = 128
        """Features of a value."""
        query_down: Linear.Config = Linear.Config()
        query_norm: Layer.Config = RMSNorm.Config()
        query_up: Linear.Config = Linear.Config()
        kv_down: Linear.Config = Linear.Config()
        kv_norm: Layer.Config = RMSNorm.Config()
        position_key: Linear.Config = Linear.Config()
        key_up: Linear.Config = Linear.Config()
        value_up: Linear.Config = Linear.Config()
        absorb_up_to: NonNegativeInt = 64
        """With a cache, rows of at most this many new tokens use absorbed weights."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        if cfg.cache is not None and not has_field(cfg.cache, "value_dim"):
            raise ConfigError(
                f"cache={type(cfg.cache).__qualname__} has no field value_dim, which storing latents requires; use "
                f"another cache, such as ContiguousCache.Config()"
            )
        for name in ("key_up", "value_up"):
            if getattr(cfg, name).use_bias:
                raise ConfigError(f"{name}.use_bias=True: a bias cannot be absorbed; set it to False")
        heads, key_dim = cfg.num_heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
        linear = functools.partial(self._linear, rngs)
        source: tuple[int, str | None] = (cfg.input_dim, "embed")
        if cfg.q_lora_rank is not None:
            self.query_down = linear("query_down", cfg.input_dim, cfg.q_lora_rank, "embed", None)
            self.query_norm = self.child("query_norm", cfg.query_norm, rngs, input_dim=cfg.q_lora_rank, axes=(None,))
            source = (cfg.q_lora_rank, None)
        self.query_up = linear("query_up", source[0], heads * key_dim, source[1], "head")
        self.kv_down = linear("kv_down", cfg.input_dim, cfg.kv_lora_rank, "embed", None)
        self.kv_norm = self.child("kv_norm", cfg.kv_norm, rngs, input_dim=cfg.kv_lora_rank, axes=(None,))
        self.position_key = linear("position_key", cfg.input_dim, cfg.qk_rope_head_dim, "embed", None)
        self.key_up = linear("key_up", cfg.kv_lora_rank, heads * cfg.qk_nope_head_dim, None, "head")
        self.value_up = linear("value_up", cfg.kv_lora_rank, heads * cfg.value_dim, None, "head")
        self.make_slots(
            rngs, num_kv_heads=heads, head_dim=key_dim, position_dim=cfg.qk_rope_head_dim, value_dim=cfg.value_dim
        )
        cache_widths = {"num_kv_heads": 1, "head_dim": cfg.kv_lora_rank + cfg.qk_rope_head_dim, "value_dim": 0}
        self.cache = self.child(
            "cache", sized(cfg.cache), rngs, input_dim=cfg.input_dim, num_heads=heads, **cache_widths
        )

    def _linear(self, rngs: Rngs, name: str, input_dim: int, output_dim: int, *axes: str | None) -> Linear:
        return self.child(name, getattr(self.config, name), rngs, input_dim=input_dim, output_dim=output_dim, axes=axes)

    def __call__(self, x: Hidden, tokens: TokenInfo) -> Hidden:
        """Computes attention and the output projection."""
        cfg, flat, shape = self.config, rows(x), x.shape[:2]
        source = flat if cfg.q_lora_rank is None else self.query_norm(self.query_down(flat))
        q = self.query_up(source).reshape(*shape, cfg.num_heads, -1)
        latent = self.kv_norm(self.kv_down(flat)).reshape(*shape, 1, -1)
        position_key = self.position_key(flat).reshape(*shape, 1, -1)
        if self.position is not None:
            position_query = q[..., cfg.qk_nope_head_dim :]
            position_query, positioned = self.positioned(position_query, position_key, tokens)
            assert positioned is not None
            position_key = positioned
            q = jnp.concatenate([q[..., : cfg.qk_nope_head_dim], position_query], axis=-1)
        if tokens.cached is not None:  # the latent is also the value
            position_key, latent = isolate_nan(position_key, latent)
        q = checkpoint_name(constrain(q, "batch", "seq", "head", None), "query")
        stored = checkpoint_name(jnp.concatenate([latent, position_key], axis=-1), "key")
        return self.project(x, self.heads(q, stored, empty_values(stored), tokens, self._attended, self._scale))

    def _attended(self, inputs: AttentionInputs) -> Heads:
        if self.cache is not None and inputs.q.shape[1] <= self.config.absorb_up_to:
            return self._absorbed(inputs)
        return self._expanded(inputs)

    def _expanded(self, inputs: AttentionInputs) -> Heads:
        """Expands the latents to keys and values, then attends to these."""
        cfg, stored = self.config, inputs.plain
        latent, position_key = stored.k[..., 0, : cfg.kv_lora_rank], stored.k[..., cfg.kv_lora_rank :]
        shape = (*latent.shape[:2], cfg.num_heads, -1)
        content_key, v = self.key_up(latent).reshape(shape), self.value_up(latent).reshape(shape)
        position_key = jnp.broadcast_to(position_key, (*shape[:3], cfg.qk_rope_head_dim))
        k = constrain(jnp.concatenate([content_key, position_key], axis=-1), "batch", "seq", "head", None)
        v = constrain(v, "batch", "seq", "head", None)
        return self.attend(inputs.replace(kv=Contiguous(k, v, stored.tokens)))

    def _absorbed(self, inputs: AttentionInputs) -> Heads:
        """The same heads, as multi-query attention to the latents: `q (W c) = (W^T q) c`."""
        cfg, q = self.config, inputs.q
        up = (cfg.kv_lora_rank, cfg.num_heads, -1)
        key_up, value_up = self.key_up.matrix().reshape(up), self.value_up.matrix().reshape(up)
        content, position = q[..., : cfg.qk_nope_head_dim], q[..., cfg.qk_nope_head_dim :]
        q = jnp.concatenate([jnp.einsum("bshd,rhd->bshr", content, key_up.astype(q.dtype)), position], axis=-1)
        heads = self.attend(inputs.replace(q=q, kv=Latent(inputs.keys, cfg.kv_lora_rank)))
        return jnp.einsum("bshr,rhd->bshd", heads, value_up.astype(heads.dtype))

    @property
    def _scale(self) -> float:
        cfg = self.config
        return 1 / math.sqrt(cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) if cfg.scale is None else cfg.scale
