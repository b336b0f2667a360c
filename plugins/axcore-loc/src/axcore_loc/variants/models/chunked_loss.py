"""A padded vocabulary, capped logits, and a loss that computes them in chunks."""

from axcore.nn import BaseAttention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import CrossEntropy, Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    layer = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=24))
    decoder = Repeat.Config(num_layers=2, layers=layer)
    model = CausalLM.Config(vocab_size=32, dim=32, decoder=decoder, pad_vocab_to=24, softcap=30.0)
    return pretraining(model, CrossEntropy.Config(chunk=4))
