"""Two stacks of different layers, one after the other."""

from axcore.nn import BaseAttention, CausalLM, FeedForward, Repeat, Sequence, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    layer = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=24))
    wider = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=40))
    decoder = Sequence.Config(
        layers=(Repeat.Config(num_layers=2, layers=layer), Repeat.Config(num_layers=4, layers=wider))
    )
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
