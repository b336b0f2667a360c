"""Biases in the feed-forward block."""

from axcore.nn import BaseAttention, CausalLM, FeedForward, Linear, Repeat, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    biased = Linear.Config(use_bias=True)
    layer = TransformerLayer.Config(
        attention=attention, ffn=FeedForward.Config(hidden_dim=24, gate=biased, up=biased, down=biased)
    )
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
