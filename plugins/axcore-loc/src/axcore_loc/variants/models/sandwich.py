"""A layer of its own: norms on both sides of each block."""

import jax

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, RMSNorm, TokenInfo, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


class SandwichLayer(TransformerLayer):
    """Norms before and after each block (Gemma 2, arXiv 2408.00118, section 2)."""

    class Config(TransformerLayer.Config):
        after_attention: ax.Layer.Config = RMSNorm.Config()
        after_ffn: ax.Layer.Config = RMSNorm.Config()

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.after_attention = self.child("after_attention", cfg.after_attention, rngs, input_dim=cfg.input_dim)
        self.after_ffn = self.child("after_ffn", cfg.after_ffn, rngs, input_dim=cfg.input_dim)

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        x = x + self.after_attention(self.attention(self.attention_norm(x), tokens))
        return x + self.after_ffn(self.ffn(self.ffn_norm(x)))


def recipe(attention: Attention.Config) -> Trainer.Config:
    layer = SandwichLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=24))
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
