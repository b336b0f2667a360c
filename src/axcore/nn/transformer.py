"""A transformer layer, and stacks of layers: one after another, or one config repeated in a scan."""

from __future__ import annotations

from typing import Any

import jax

from axcore.config import REQUIRED, at_least
from axcore.module import Layer, Rngs, scan, stack
from axcore.nn.attention import Attention
from axcore.nn.feed_forward import FeedForward
from axcore.nn.norm import RMSNorm
from axcore.nn.tokens import TokenInfo
from axcore.parallel import Remat, constrain


class TransformerLayer(Layer):
    """Attention, then a feed-forward block, each behind a norm and inside a residual (pre-norm)."""

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        attention_norm: Layer.Config = RMSNorm.Config()
        attention: Layer.Config = Attention.Config()
        ffn_norm: Layer.Config = RMSNorm.Config()
        ffn: Layer.Config = FeedForward.Config()

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        self.attention_norm = self.child("attention_norm", cfg.attention_norm, rngs, input_dim=cfg.input_dim)
        self.attention = self.child("attention", cfg.attention, rngs, input_dim=cfg.input_dim)
        self.ffn_norm = self.child("ffn_norm", cfg.ffn_norm, rngs, input_dim=cfg.input_dim)
        self.ffn = self.child("ffn", cfg.ffn, rngs, input_dim=cfg.input_dim)

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape."""
        x = x + self.attention(self.attention_norm(x), tokens)
        x = x + self.ffn(self.ffn_norm(x))
        return constrain(x, "batch", "seq", "embed_activation")


class Sequence(Layer):
    """Layers one after another, each with a config of its own. In `Repeat`, the group that is repeated."""

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        layers: tuple[Layer.Config, ...]

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        self.layers = self.children("layers", cfg.layers, rngs, input_dim=cfg.input_dim)

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape; `args` go to every layer."""
        for layer in self.layers:
            x = layer(x, *args)
        return x


class Repeat(Layer):
    """`num_layers` layers of one config, one after the other, compiled once (`jax.lax.scan`).

    Their parameters are stacked on a leading `layer` axis, so compile time does not grow with depth.
    """

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        num_layers: int = REQUIRED
        layers: Layer.Config = TransformerLayer.Config()
        """The config that every layer is built from."""
        unroll: int = 1
        """Layers in one step of the loop: compile time against speed. It changes no number that is computed."""
        remat: Remat | None = None
        """None: the backward pass keeps every intermediate value."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "input_dim", "num_layers", "unroll")
        self.layers = stack(
            lambda rngs: self.build_child(cfg.layers, rngs, input_dim=cfg.input_dim), rngs.at("layers"), cfg.num_layers
        )

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape; `args` go to every layer."""
        cfg = self.config
        remat = cfg.remat.policy() if cfg.remat is not None else None
        return scan(self.layers, x, *args, count=cfg.num_layers, unroll=cfg.unroll, remat=remat)
