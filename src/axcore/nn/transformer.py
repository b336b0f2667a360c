"""Transformer layers, and stacks of layers: one after another, or one config repeated in a scan."""

from __future__ import annotations

from typing import Any

import jax

from axcore.config import REQUIRED, at_least
from axcore.module import Layer, Rngs, remat, scan, stack
from axcore.nn.attention import Attention
from axcore.nn.dropout import check_rates, dropout
from axcore.nn.feed_forward import FeedForward
from axcore.nn.norm import LayerNorm, RMSNorm
from axcore.nn.tokens import TokenInfo
from axcore.parallel import Remat, constrain

HIDDEN = ("batch", "seq", "embed_activation")
"""Logical axes of the hidden stream."""


class TransformerLayer(Layer):
    """Attention, then a feed-forward block, each inside a residual: `x + output_norm(block(norm(x)))`.

    A norm that is None is left out. Pre-norm by default; with both norms it is sandwich normalization (Gemma 2), with
    the output norm alone that of OLMo 2.
    """

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        attention_norm: Layer.Config | None = RMSNorm.Config()
        attention: Layer.Config = Attention.Config()
        attention_output_norm: Layer.Config | None = None
        ffn_norm: Layer.Config | None = RMSNorm.Config()
        ffn: Layer.Config = FeedForward.Config()
        ffn_output_norm: Layer.Config | None = None
        dropout: float = 0.0
        """Chance of each feature that is added to the residual stream to be zeroed while training."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        check_rates(cfg, "dropout")
        wide = {"input_dim": cfg.input_dim}
        self.attention_norm = self.child("attention_norm", cfg.attention_norm, rngs, **wide)
        self.attention = self.child("attention", cfg.attention, rngs, **wide)
        self.attention_output_norm = self.child("attention_output_norm", cfg.attention_output_norm, rngs, **wide)
        self.ffn_norm = self.child("ffn_norm", cfg.ffn_norm, rngs, **wide)
        self.ffn = self.child("ffn", cfg.ffn, rngs, **wide)
        self.ffn_output_norm = self.child("ffn_output_norm", cfg.ffn_output_norm, rngs, **wide)

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape."""
        for norm, block, output_norm, args in (
            (self.attention_norm, self.attention, self.attention_output_norm, (tokens,)),
            (self.ffn_norm, self.ffn, self.ffn_output_norm, ()),
        ):
            y = block(_maybe(norm, x), *args)
            x = constrain(x + dropout(self, _maybe(output_norm, y), self.config.dropout), *HIDDEN)
        return x


class PostNormLayer(Layer):
    """`norm(x + block(x))`, for attention and then for the feed-forward block (Vaswani et al. 2017, section 3.1)."""

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        attention: Layer.Config = Attention.Config()
        attention_norm: Layer.Config = LayerNorm.Config()
        ffn: Layer.Config = FeedForward.Config()
        ffn_norm: Layer.Config = LayerNorm.Config()
        dropout: float = 0.0
        """Chance of each feature that is added to the residual stream to be zeroed while training."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        check_rates(cfg, "dropout")
        wide = {"input_dim": cfg.input_dim}
        self.attention = self.child("attention", cfg.attention, rngs, **wide)
        self.attention_norm = self.child("attention_norm", cfg.attention_norm, rngs, **wide)
        self.ffn = self.child("ffn", cfg.ffn, rngs, **wide)
        self.ffn_norm = self.child("ffn_norm", cfg.ffn_norm, rngs, **wide)

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape."""
        rate = self.config.dropout
        x = constrain(self.attention_norm(x + dropout(self, self.attention(x, tokens), rate)), *HIDDEN)
        return constrain(self.ffn_norm(x + dropout(self, self.ffn(x), rate)), *HIDDEN)


class ParallelLayer(Layer):
    """Attention and feed-forward block side by side: `x + attention(norm(x)) + ffn(norm(x))` (GPT-J; PaLM, arXiv
    2204.02311, section 2)."""

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        norm: Layer.Config = RMSNorm.Config()
        attention: Layer.Config = Attention.Config()
        ffn_norm: Layer.Config | None = None
        """None: the feed-forward block sees what attention sees. Given: a norm of its own (GPT-NeoX)."""
        ffn: Layer.Config = FeedForward.Config()
        dropout: float = 0.0
        """Chance of each feature that is added to the residual stream to be zeroed while training."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        check_rates(cfg, "dropout")
        wide = {"input_dim": cfg.input_dim}
        self.norm = self.child("norm", cfg.norm, rngs, **wide)
        self.attention = self.child("attention", cfg.attention, rngs, **wide)
        self.ffn_norm = self.child("ffn_norm", cfg.ffn_norm, rngs, **wide)
        self.ffn = self.child("ffn", cfg.ffn, rngs, **wide)

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape."""
        y = self.norm(x)
        both = self.attention(y, tokens) + self.ffn(y if self.ffn_norm is None else self.ffn_norm(x))
        return constrain(x + dropout(self, both, self.config.dropout), *HIDDEN)


def _maybe(norm: Any, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class Sequence(Layer):
    """Layers one after another, each with a config of its own. In `Repeat`, the group that is repeated."""

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        layers: tuple[Layer.Config, ...]
        remat: Remat | None = None
        """Of each layer that has none of its own; what a layer shares then stays inside it. None: the backward pass
        keeps every intermediate value."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        self.layers = self.children("layers", cfg.layers, rngs, input_dim=cfg.input_dim)

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape; `args` go to every layer."""
        own = self.config.remat
        again = None if own is None else remat(lambda layer, *args: layer(*args), policy=own.policy())
        for layer in self.layers:
            has_own = getattr(layer.config, "remat", None) is not None
            x = layer(x, *args) if again is None or has_own else again(layer, x, *args)
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
        """Of what is repeated, as a whole: for layers of a group each alone, see `Sequence.Config.remat`. None: the
        backward pass keeps every intermediate value."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "input_dim", "num_layers", "unroll")
        self.layers = stack(
            lambda rngs: self.build_child(cfg.layers, rngs, input_dim=cfg.input_dim), rngs.at("layers"), cfg.num_layers
        )

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape; `args` go to every layer."""
        cfg = self.config
        policy = cfg.remat.policy() if cfg.remat is not None else None
        return scan(self.layers, x, *args, count=cfg.num_layers, unroll=cfg.unroll, remat=policy)
