"""Multi-token prediction: modules that predict tokens beyond the next one while training."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from axcore.config import REQUIRED, PositiveInt
from axcore.module import Layer, Rngs, method
from axcore.nn.linear import Linear
from axcore.nn.norm import RMSNorm
from axcore.nn.tokens import TokenInfo
from axcore.nn.transformer import TransformerLayer
from axcore.parallel import check_gathers


class MultiTokenPrediction(Layer):
    """A module that predicts one token further ahead than the previous one:
    `layer(projection([hidden_norm(hidden), embedding_norm(embedding)]))` (DeepSeek-V3, arXiv 2412.19437, eq. 21-23).

    `embedding` is the embedding of a later token. The module shares the embedding table and the head of the model.
    """

    class Config(Layer.Config):
        input_dim: PositiveInt = REQUIRED
        hidden_norm: Layer.Config = RMSNorm.Config()
        embedding_norm: Layer.Config = RMSNorm.Config()
        projection: Linear.Config = Linear.Config()
        layer: Layer.Config = TransformerLayer.Config()
        norm: Layer.Config = RMSNorm.Config()
        """Applied before the head."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        dim = cfg.input_dim
        self.hidden_norm = self.child("hidden_norm", cfg.hidden_norm, rngs, input_dim=dim)
        self.embedding_norm = self.child("embedding_norm", cfg.embedding_norm, rngs, input_dim=dim)
        widths = {"input_dim": 2 * dim, "output_dim": dim, "axes": ("embed", None)}
        self.projection = self.child("projection", cfg.projection, rngs, **widths)
        self.layer = self.child("layer", cfg.layer, rngs, input_dim=dim)
        self.norm = self.child("norm", cfg.norm, rngs, input_dim=dim)

    def __call__(
        self, hidden: Float[Array, "batch seq embed"], embedding: Float[Array, "batch seq embed"], tokens: TokenInfo
    ) -> Float[Array, "batch seq embed"]:
        """The hidden states that predict one token further ahead than `hidden`.

        Args:
            hidden: the result of the decoder or of the previous module.
            embedding: the embeddings of the tokens that `hidden` predicts.
            tokens: the tokens of `hidden`.

        Raises:
            ConfigError: the call is inside a pipeline stage, and the mesh has several further axes.
        """
        check_gathers("multi-token prediction", "Set all but one of them to 1")
        both = jnp.concatenate([self.hidden_norm(hidden), self.embedding_norm(embedding)], axis=-1)
        return self.layer(self.projection(both), tokens)

    @method
    def normed(self, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """The input of the head."""
        return self.norm(hidden)


def shifted(x: Shaped[Array, "batch seq"], ahead: int) -> Shaped[Array, "batch seq"]:
    """`x` shifted to the left by `ahead` places and filled with 0 at the end."""
    return jnp.pad(x[:, ahead:], ((0, 0), (0, min(ahead, x.shape[1]))))
