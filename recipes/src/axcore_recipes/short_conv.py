"""A transformer layer that starts with a short causal convolution over tokens."""

from __future__ import annotations

from jaxtyping import Array, Float

import axcore as ax
from axcore.nn import Initializer, TokenInfo, TransformerLayer, Windowed, Zeros

Hidden = Float[Array, "batch seq input_dim"]


class ShortConv(Windowed):
    """`y_t = x_t + sum_k weight_k x_{t - k}`, per feature and within a document.

    The layer is initialized to the identity. To copy the continuation of an earlier occurrence, attention requires
    tokens that contain information about their predecessors. The convolution provides it directly (Allen-Zhu 2025,
    Physics of Language Models 4.1, "Canon layers").
    """

    class Config(Windowed.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        width: ax.PositiveInt = 4
        """Number of mixed tokens, including the current one."""
        init: Initializer = Zeros()

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        self.weight = self.param("weight", (cfg.width, cfg.input_dim), cfg.init, rngs, axes=(None, "embed"))
        self.remember(cfg.width - 1, cfg.input_dim, axis="embed")

    def __call__(self, x: Hidden, tokens: TokenInfo) -> Hidden:
        """Adds the weighted previous tokens to each token."""
        inputs = self.lagged(x, tokens)
        return x + sum(weight * inputs[lag] for lag, weight in enumerate(self.weight[...].astype(x.dtype)))


class ConvTransformerLayer(TransformerLayer):
    """A transformer layer that first applies a short convolution to the residual stream."""

    class Config(TransformerLayer.Config):
        conv: ShortConv.Config = ShortConv.Config()

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.conv = self.child("conv", cfg.conv, rngs, input_dim=cfg.input_dim)

    def __call__(self, x: Hidden, tokens: TokenInfo) -> Hidden:
        """Convolution, attention and feed-forward block."""
        return super().__call__(self.conv(x, tokens), tokens)
