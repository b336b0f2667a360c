"""Two layers in each step of the loop."""

from axcore.nn import BaseAttention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    layer = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=24))
    decoder = Repeat.Config(num_layers=4, layers=layer, unroll=2)
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
