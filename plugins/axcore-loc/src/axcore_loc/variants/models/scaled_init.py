"""Small embeddings, and feed-forward blocks that start at zero."""

from axcore.nn import BaseAttention, CausalLM, Embedding, FeedForward, Linear, Normal, Repeat, TransformerLayer, Zeros
from axcore.train import Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    layer = TransformerLayer.Config(
        attention=attention, ffn=FeedForward.Config(hidden_dim=24, down=Linear.Config(init=Zeros()))
    )
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return pretraining(
        CausalLM.Config(vocab_size=32, dim=32, decoder=decoder, embedding=Embedding.Config(init=Normal(stddev=0.01)))
    )
