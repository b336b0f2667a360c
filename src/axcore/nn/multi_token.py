"""Multi-token prediction: modules that predict tokens further ahead while training."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED
from axcore.module import Layer, Rngs, method
from axcore.nn.linear import Linear
from axcore.nn.norm import RMSNorm
from axcore.nn.tokens import TokenInfo
from axcore.nn.transformer import TransformerLayer


class FutureToken(Layer):
    """`layer(projection([hidden_norm(hidden), embedding_norm(embedding)]))` (DeepSeek-V3, arXiv 2412.19437, eq. 21-23).

    The embedding is that of a later token, and embedding and head are the model's own.
    """

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        hidden_norm: Layer.Config = RMSNorm.Config()
        embedding_norm: Layer.Config = RMSNorm.Config()
        projection: Linear.Config = Linear.Config()
        layer: Layer.Config = TransformerLayer.Config()
        norm: Layer.Config = RMSNorm.Config()
        """Before the head."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        dim = cfg.input_dim
        self.hidden_norm = self.child("hidden_norm", cfg.hidden_norm, rngs, input_dim=dim)
        self.embedding_norm = self.child("embedding_norm", cfg.embedding_norm, rngs, input_dim=dim)
        wide = {"input_dim": 2 * dim, "output_dim": dim, "axes": ("embed", None)}
        self.projection = self.child("projection", cfg.projection, rngs, **wide)
        self.layer = self.child("layer", cfg.layer, rngs, input_dim=dim)
        self.norm = self.child("norm", cfg.norm, rngs, input_dim=dim)

    def __call__(self, hidden: jax.Array, embedding: jax.Array, tokens: TokenInfo) -> jax.Array:
        """What predicts one token further than `hidden` does.

        Args:
            hidden: [batch, seq, input_dim], of the decoder or of the module before.
            embedding: [batch, seq, input_dim], of the token that `hidden` predicts.
            tokens: where the tokens of `hidden` stand.

        Returns:
            [batch, seq, input_dim].
        """
        both = jnp.concatenate([self.hidden_norm(hidden), self.embedding_norm(embedding)], axis=-1)
        return self.layer(self.projection(both), tokens)

    @method
    def normed(self, hidden: jax.Array) -> jax.Array:
        """What goes into the head."""
        return self.norm(hidden)


def shifted(x: jax.Array, ahead: int) -> jax.Array:
    """[batch, seq] -> at each place what stands `ahead` places further on; 0 beyond the end."""
    return jnp.pad(x[:, ahead:], ((0, 0), (0, min(ahead, x.shape[1]))))
