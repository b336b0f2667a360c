"""Flax's own LayerNorm in place of RMSNorm."""

from flax import nnx

import axcore as ax
from axcore.nn import BaseAttention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    norm = ax.stock(nnx.LayerNorm, widths={"num_features": "input_dim"}, epsilon=1e-5)
    layer = TransformerLayer.Config(
        attention=attention, ffn=FeedForward.Config(hidden_dim=24), attention_norm=norm, ffn_norm=norm
    )
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder, norm=norm))
