"""Normalization, and other layers that act on each vector separately."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from axcore.config import REQUIRED, ConfigError, PositiveFloat, PositiveInt
from axcore.module import Layer, Rngs
from axcore.nn.initializers import Initializer, Ones, Zeros


class RMSNorm(Layer):
    """`x / rms(x) * scale` over the last dimension, in float32 (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4)."""

    class Config(Layer.Config):
        input_dim: PositiveInt = REQUIRED
        eps: PositiveFloat = 1e-5
        zero_centred: bool = False
        """The scale is 1 + parameter. The parameter starts at 0, so weight decay pulls the scale towards 1 (Gemma)."""
        use_scale: bool = True
        groups: PositiveInt = 1
        """Number of equal parts of the vector that are normalized separately (the gated norm of Mamba-2)."""
        init: Initializer | None = None
        """Initializer of the parameter; None: the scale starts at 1."""
        axes: tuple[str | None] | None = None
        """Logical axis of the scale; None: the parent's, or `embed`."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        _check_groups(cfg)
        self.scale = nnx.data(None)
        if cfg.use_scale:
            self.scale = self.param("scale", (cfg.input_dim,), _initial(cfg), rngs, axes=cfg.axes or ("embed",))

    def __call__(self, x: Float[Array, "*shape input_dim"]) -> Float[Array, "*shape input_dim"]:
        """The normalized vectors, in the compute dtype."""
        parts = _parts(self.config, x)
        y = parts * jax.lax.rsqrt(jnp.mean(jnp.square(parts), axis=-1, keepdims=True) + self.config.eps)
        y = y.reshape(x.shape)
        if self.scale is not None:
            y = y * _scale(self.config, self.scale[...])
        return y.astype(self.dtypes.compute)


class LayerNorm(Layer):
    """`(x - mean) / std * scale + bias` over the last dimension, in float32 (Ba et al. 2016, arXiv 1607.06450)."""

    class Config(Layer.Config):
        input_dim: PositiveInt = REQUIRED
        eps: PositiveFloat = 1e-5
        zero_centred: bool = False
        """The scale is 1 + parameter, as in `RMSNorm` (Nemotron-4, arXiv 2402.16819)."""
        use_bias: bool = True
        groups: PositiveInt = 1
        """Number of equal parts of the vector that are normalized separately."""
        init: Initializer | None = None
        """Initializer of the parameter of the scale; None: the scale starts at 1."""
        axes: tuple[str | None] | None = None
        """Logical axis of scale and bias; None: the parent's, or `embed`."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        _check_groups(cfg)
        axes = cfg.axes or ("embed",)
        self.scale = self.param("scale", (cfg.input_dim,), _initial(cfg), rngs, axes=axes)
        self.bias = self.param("bias", (cfg.input_dim,), Zeros(), rngs, axes=axes) if cfg.use_bias else nnx.data(None)

    def __call__(self, x: Float[Array, "*shape input_dim"]) -> Float[Array, "*shape input_dim"]:
        """The normalized vectors, in the compute dtype."""
        parts = _parts(self.config, x)
        parts = parts - jnp.mean(parts, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(parts), axis=-1, keepdims=True)
        y = (parts * jax.lax.rsqrt(variance + self.config.eps)).reshape(x.shape) * _scale(self.config, self.scale[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(self.dtypes.compute)


def _initial(cfg: RMSNorm.Config | LayerNorm.Config) -> Initializer:
    return cfg.init or (Zeros() if cfg.zero_centred else Ones())


def _scale(cfg: RMSNorm.Config | LayerNorm.Config, parameter: Float[Array, " width"]) -> Float[Array, " width"]:
    parameter = parameter.astype(jnp.float32)
    return 1.0 + parameter if cfg.zero_centred else parameter


def _check_groups(cfg: RMSNorm.Config | LayerNorm.Config) -> None:
    if cfg.input_dim % cfg.groups:
        raise ConfigError(f"input_dim={cfg.input_dim} is not a multiple of groups={cfg.groups}; set groups")


def _parts(cfg: RMSNorm.Config | LayerNorm.Config, x: Float[Array, "*shape input_dim"]) -> Float[Array, "*shape part"]:
    """The vectors that are normalized, in float32: those of `x`, or the `groups` parts of each."""
    x = x.astype(jnp.float32)
    return x if cfg.groups == 1 else x.reshape(*x.shape[:-1], cfg.groups, -1)


class Scale(Layer):
    """A learned factor for each feature, for example a learned query scale in the slot `query_norm`."""

    class Config(Layer.Config):
        input_dim: PositiveInt = REQUIRED
        init: Initializer = Ones()
        axes: tuple[str | None] | None = None

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        self.scale = self.param("scale", (cfg.input_dim,), cfg.init, rngs, axes=cfg.axes or (None,))

    def __call__(self, x: Float[Array, "*shape input_dim"]) -> Float[Array, "*shape input_dim"]:
        """The scaled vectors, in the dtype of `x`."""
        return x * self.scale[...].astype(x.dtype)


class FullWidthNorm(Layer):
    """Normalizes all heads of a token as one vector (OLMo 2, arXiv 2501.00656, section 3.2).

    Use it in the slots `query_norm` and `key_norm`, where other norms act on each head separately.
    """

    class Config(Layer.Config):
        num_heads: PositiveInt = REQUIRED
        head_dim: PositiveInt = REQUIRED
        norm: Layer.Config = RMSNorm.Config()
        head_axis: str | None = None
        """Logical axis of the heads; None: the parent's, or `head`."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        width = cfg.num_heads * cfg.head_dim
        self.norm = self.child("norm", cfg.norm, rngs, input_dim=width, axes=(cfg.head_axis or "head",))

    def __call__(self, x: Float[Array, "batch seq head head_dim"]) -> Float[Array, "batch seq head head_dim"]:
        """The normalized heads."""
        return self.norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


class PerHeadNorm(Layer):
    """Normalizes each head of a token separately, with a scale of its own for each head (Command R+, StableLM 2 12B).

    Use it in the slots `query_norm` and `key_norm`, where other norms share one scale between the heads.
    """

    class Config(Layer.Config):
        num_heads: PositiveInt = REQUIRED
        head_dim: PositiveInt = REQUIRED
        norm: Layer.Config = LayerNorm.Config()
        """A norm with the field `groups`."""
        head_axis: str | None = None
        """Logical axis of the heads; None: the parent's, or `head`."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        norm, width = cfg.norm.set(groups=cfg.num_heads), cfg.num_heads * cfg.head_dim
        self.norm = self.child("norm", norm, rngs, input_dim=width, axes=(cfg.head_axis or "head",))

    def __call__(self, x: Float[Array, "batch seq head head_dim"]) -> Float[Array, "batch seq head head_dim"]:
        """The normalized heads."""
        return self.norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
