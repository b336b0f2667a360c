"""Norms before and after each block."""

from axcore.nn import BaseAttention, CausalLM, FeedForward, Repeat, RMSNorm, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    norm = RMSNorm.Config(zero_centred=True)
    layer = TransformerLayer.Config(
        attention=attention,
        attention_output_norm=norm,
        ffn=FeedForward.Config(hidden_dim=24),
        ffn_output_norm=norm,
    )
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
