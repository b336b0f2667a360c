"""A layer of its own: norms behind each residual."""

import jax

from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TokenInfo, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


class PostNormLayer(TransformerLayer):
    """`norm(x + f(x))` for each block (Vaswani et al. 2017, arXiv 1706.03762, section 3.1)."""

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        x = self.attention_norm(x + self.attention(x, tokens))
        return self.ffn_norm(x + self.ffn(x))


def recipe(attention: Attention.Config) -> Trainer.Config:
    layer = PostNormLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=24))
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
