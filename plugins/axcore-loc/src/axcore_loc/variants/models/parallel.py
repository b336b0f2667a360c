"""A custom layer: attention and feed-forward block in parallel."""

import jax

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, RMSNorm, TokenInfo
from axcore.train import Trainer

from ..training import pretraining


class ParallelLayer(ax.Layer):
    """Attention and feed-forward block in parallel (PaLM, arXiv 2204.02311, section 2)."""

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        norm: ax.Layer.Config = RMSNorm.Config()
        attention: ax.Layer.Config = Attention.Config()
        ffn: ax.Layer.Config = FeedForward.Config()

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        self.norm = self.child("norm", cfg.norm, rngs, input_dim=cfg.input_dim)
        self.attention = self.child("attention", cfg.attention, rngs, input_dim=cfg.input_dim)
        self.ffn = self.child("ffn", cfg.ffn, rngs, input_dim=cfg.input_dim)

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        y = self.norm(x)
        return x + self.attention(y, tokens) + self.ffn(y)


def recipe(attention: Attention.Config) -> Trainer.Config:
    layer = ParallelLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=24))
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
