"""Named values are saved, the rest is recomputed."""

from axcore.nn import BaseAttention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.parallel import ByTag
from axcore.train import Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    layer = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=24))
    decoder = Repeat.Config(num_layers=4, layers=layer, remat=ByTag(save=("heads", "gate")))
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
