"""A feed-forward block without a gate, and dropout."""

import jax

from axcore.nn import BaseAttention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    ffn = FeedForward.Config(hidden_dim=24, gate=None, activation=jax.nn.gelu, dropout=0.1)
    layer = TransformerLayer.Config(attention=attention, ffn=ffn, dropout=0.1)
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder, dropout=0.1))
