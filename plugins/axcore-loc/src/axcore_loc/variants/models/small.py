"""The baseline: two layers."""

from axcore.nn import BaseAttention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    layer = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=24))
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
