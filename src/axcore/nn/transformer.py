"""Transformer layers, and stacks of layers: a sequence of layers, or one layer repeated in a scan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import jax.numpy as jnp

from axcore.config import REQUIRED, ConfigError, Fraction, PositiveFloat, PositiveInt, shown_type, walk
from axcore.module import Layer, Rngs, remat, scan, stack, traced_once
from axcore.nn.attention.base import Hidden
from axcore.nn.attention.grouped_query import Attention
from axcore.nn.choosing import is_recording
from axcore.nn.dropout import dropout
from axcore.nn.feed_forward import FeedForward
from axcore.nn.layer_stack import Place, Stack
from axcore.nn.norm import LayerNorm, RMSNorm
from axcore.nn.tokens import TokenInfo
from axcore.parallel import Remat, constrain

HIDDEN = ("batch", "seq", "embed_activation")
"""Logical axes of the residual stream."""


class TransformerLayer(Layer):
    """Attention, then a feed-forward block, each inside a residual: `x + residual_scale * output_norm(block(norm(x)))`.

    Each norm may be None. The default is pre-norm. Both norms together give the sandwich normalization of Gemma 2, the
    output norm alone gives the normalization of OLMo 2.
    """

    class Config(Layer.Config):
        input_dim: PositiveInt = REQUIRED
        attention_norm: Layer.Config | None = RMSNorm.Config()
        attention: Layer.Config = Attention.Config()
        attention_output_norm: Layer.Config | None = None
        ffn_norm: Layer.Config | None = RMSNorm.Config()
        ffn: Layer.Config = FeedForward.Config()
        ffn_output_norm: Layer.Config | None = None
        dropout: Fraction = 0.0
        """Probability of zeroing each feature that is added to the residual stream while training."""
        residual_scale: PositiveFloat = 1.0
        """Factor of what is added to the residual stream (Granite, arXiv 2404.13952)."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        widths = {"input_dim": cfg.input_dim}
        self.attention_norm = self.child("attention_norm", cfg.attention_norm, rngs, **widths)
        self.attention = self.child("attention", cfg.attention, rngs, **widths)
        self.attention_output_norm = self.child("attention_output_norm", cfg.attention_output_norm, rngs, **widths)
        self.ffn_norm = self.child("ffn_norm", cfg.ffn_norm, rngs, **widths)
        self.ffn = self.child("ffn", cfg.ffn, rngs, **widths)
        self.ffn_output_norm = self.child("ffn_output_norm", cfg.ffn_output_norm, rngs, **widths)

    def __call__(self, x: Hidden, tokens: TokenInfo) -> Hidden:
        """Applies the layer."""
        for norm, block, output_norm, args in (
            (self.attention_norm, self.attention, self.attention_output_norm, (tokens,)),
            (self.ffn_norm, self.ffn, self.ffn_output_norm, ffn_arguments(self.ffn, tokens)),
        ):
            y = block(_maybe(norm, x), *args)
            x = constrain(x + _scaled(self, _maybe(output_norm, y)), *HIDDEN)
        return x


class PostNormLayer(Layer):
    """`norm(x + residual_scale * block(x))`, for attention and then for the feed-forward block (Vaswani et al. 2017,
    section 3.1)."""

    class Config(Layer.Config):
        input_dim: PositiveInt = REQUIRED
        attention: Layer.Config = Attention.Config()
        attention_norm: Layer.Config = LayerNorm.Config()
        ffn: Layer.Config = FeedForward.Config()
        ffn_norm: Layer.Config = LayerNorm.Config()
        dropout: Fraction = 0.0
        """Probability of zeroing each feature that is added to the residual stream while training."""
        residual_scale: PositiveFloat = 1.0
        """Factor of what is added to the residual stream."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        widths = {"input_dim": cfg.input_dim}
        self.attention = self.child("attention", cfg.attention, rngs, **widths)
        self.attention_norm = self.child("attention_norm", cfg.attention_norm, rngs, **widths)
        self.ffn = self.child("ffn", cfg.ffn, rngs, **widths)
        self.ffn_norm = self.child("ffn_norm", cfg.ffn_norm, rngs, **widths)

    def __call__(self, x: Hidden, tokens: TokenInfo) -> Hidden:
        """Applies the layer."""
        x = constrain(self.attention_norm(x + _scaled(self, self.attention(x, tokens))), *HIDDEN)
        y = self.ffn(x, *ffn_arguments(self.ffn, tokens))
        return constrain(self.ffn_norm(x + _scaled(self, y)), *HIDDEN)


class ParallelLayer(Layer):
    """Attention and feed-forward block in parallel: `x + residual_scale * (attention(norm(x)) + ffn(norm(x)))` (GPT-J;
    PaLM, arXiv 2204.02311, section 2)."""

    class Config(Layer.Config):
        input_dim: PositiveInt = REQUIRED
        norm: Layer.Config = RMSNorm.Config()
        attention: Layer.Config = Attention.Config()
        ffn_norm: Layer.Config | None = None
        """Norm of the feed-forward block (GPT-NeoX); None: the block shares `norm` with attention."""
        ffn: Layer.Config = FeedForward.Config()
        dropout: Fraction = 0.0
        """Probability of zeroing each feature that is added to the residual stream while training."""
        residual_scale: PositiveFloat = 1.0
        """Factor of what is added to the residual stream."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        widths = {"input_dim": cfg.input_dim}
        self.norm = self.child("norm", cfg.norm, rngs, **widths)
        self.attention = self.child("attention", cfg.attention, rngs, **widths)
        self.ffn_norm = self.child("ffn_norm", cfg.ffn_norm, rngs, **widths)
        self.ffn = self.child("ffn", cfg.ffn, rngs, **widths)

    def __call__(self, x: Hidden, tokens: TokenInfo) -> Hidden:
        """Applies the layer."""
        y = self.norm(x)
        z = y if self.ffn_norm is None else self.ffn_norm(x)
        both = self.attention(y, tokens) + self.ffn(z, *ffn_arguments(self.ffn, tokens))
        return constrain(x + _scaled(self, both), *HIDDEN)


def ffn_arguments(ffn: Layer, tokens: TokenInfo) -> tuple[TokenInfo, ...]:
    """The arguments after `x` of a feed-forward block: the tokens if its class has `takes_tokens = True`, as a mixture
    of experts, whose statistics leave out padding."""
    return (tokens,) if getattr(ffn, "takes_tokens", False) else ()


def _scaled(layer: TransformerLayer | PostNormLayer | ParallelLayer, y: Hidden) -> Hidden:
    """What the layer adds to the residual stream: `residual_scale * y`, with dropout."""
    cfg, y = layer.config, dropout(layer, y, layer.config.dropout)
    return y if cfg.residual_scale == 1.0 else (cfg.residual_scale * y.astype(jnp.float32)).astype(y.dtype)


def _maybe(norm: Callable[[Hidden], Hidden] | None, x: Hidden) -> Hidden:
    return x if norm is None else norm(x)


class Sequence(Stack):
    """A sequence of layers, each with its own config. Inside a `Repeat` it is the group that is repeated."""

    class Config(Stack.Config):
        is_sequential: ClassVar[bool] = True
        layout_fields = ("remat",)
        input_dim: PositiveInt = REQUIRED
        layers: tuple[Layer.Config, ...]
        remat: Remat | None = None
        """Remat policy of each layer that does not set one itself; None: the backward pass keeps every intermediate
        value."""

        def places(self) -> tuple[Place, ...]:
            return tuple(Place(f"layers.{number}", (), layer) for number, layer in enumerate(self.layers))

        def restack(self, layers: tuple[Layer.Config, ...]) -> Layer.Config:
            return self.set(layers=layers)

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        self.layers = self.children("layers", cfg.layers, rngs, input_dim=cfg.input_dim)

    def __call__(self, x: Hidden, *args: object) -> Hidden:
        """Applies the layers in order. `args` are passed to every layer."""
        cfg = self.config.remat
        # An engine has many programs. With compiled ones on disk, tracing every layer would take most of its start.
        if any(isinstance(each, TokenInfo) and each.cached is not None for each in args) and not is_recording():
            call = traced_once(_call)
            for layer in self.layers:
                x = call(layer, x, *args)
            return x
        for layer, layer_cfg in zip(self.layers, self.config.layers, strict=True):
            policy = None if cfg is None or _has_remat(layer_cfg) else cfg.for_layer(layer_cfg)
            call = layer if policy is None else functools.partial(remat(_call, policy=policy.policy()), layer)
            x = call(x, *args)
        return x


class Repeat(Stack):
    """A sequence of `num_layers` layers with the same config, as a `jax.lax.scan`.

    The layer is compiled once, so compile time does not grow with depth. Parameters are stacked on a leading `layer`
    axis.
    """

    class Config(Stack.Config):
        is_sequential: ClassVar[bool] = True
        layout_fields = ("remat", "unroll")
        input_dim: PositiveInt = REQUIRED
        num_layers: PositiveInt = REQUIRED
        layers: Layer.Config = TransformerLayer.Config()
        """The config that every layer is built from."""
        unroll: PositiveInt = 1
        """Number of layers in one step of the loop. A larger number runs faster and compiles more slowly; results are
        equal."""
        remat: Remat | None = None
        """Remat policy of one repetition; None: the backward pass keeps every intermediate value. If the repetition is
        a group of layers, `Sequence.Config.remat` sets the policy of each layer."""

        def places(self) -> tuple[Place, ...]:
            if self.num_layers is REQUIRED:
                raise ConfigError("num_layers of a Repeat is REQUIRED; set it before the layers are numbered")
            return tuple(Place("layers", (number,), self.layers) for number in range(self.num_layers))

        def restack(self, layers: tuple[Layer.Config, ...]) -> Layer.Config:
            """See `Stack.Config.restack`: a single scan if all layers are equal, otherwise the result of `stacked`.

            Raises:
                ConfigError: the layers differ, and this is a subclass that does not override `restack`.
            """
            if layers and all(layer == layers[0] for layer in layers):
                return self.set(num_layers=len(layers), layers=layers[0])
            if type(self) is not Repeat.Config:
                raise ConfigError(
                    f"the layers of a {shown_type(type(self))} are unequal, and it inherits restack from Repeat, which "
                    f"would replace it with another class. Override restack in its Config"
                )
            made = stacked(layers, remat=self.remat, unroll=self.unroll)
            return made.set(input_dim=self.input_dim, dtypes=self.dtypes, tags=self.tags)

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        self.layers = stack(
            lambda rngs: self.build_child(cfg.layers, rngs, input_dim=cfg.input_dim), rngs.at("layers"), cfg.num_layers
        )

    def __call__(self, x: Hidden, *args: object) -> Hidden:
        """Applies the layers in order. `args` are passed to every layer."""
        cfg = self.config
        chosen = cfg.remat.for_layer(cfg.layers) if cfg.remat is not None else None
        policy = chosen.policy() if chosen is not None else None
        return scan(self.layers, x, *args, count=cfg.num_layers, unroll=cfg.unroll, remat=policy)


def stacked(
    layers: Iterable[Layer.Config], *, remat: Remat | None = None, unroll: int = 1
) -> Repeat.Config | Sequence.Config:
    """A decoder that runs these layers. Consecutive equal layers, or equal groups of layers, become a scan.

    Equal layers become a `Repeat`. A repeating group, such as five local layers and a global one, becomes a `Repeat` of
    a `Sequence`. Other lists, such as a dense layer and many layers with experts, become a `Sequence` of scans and
    single layers.

    Args:
        layers: configs of the layers, in execution order.
        remat: policy of each layer.
        unroll: number of layers in one step of a scan.

    Raises:
        ConfigError: `layers` is empty.
    """
    layers = tuple(layers)
    if not layers:
        raise ConfigError("stacked requires at least one layer, got none")
    parts: list[Layer.Config] = []
    has_single, start = False, 0
    while start < len(layers):
        size, count = _longest(layers, start)
        group = layers[start : start + size]
        if count == 1:
            parts += group
            has_single = True
        else:
            steps = min(count, -(-unroll // size))
            sets_remat = size > 1 or _has_remat(group[0])
            layer = Sequence.Config(layers=group, remat=remat) if size > 1 else group[0]
            parts.append(
                Repeat.Config(num_layers=count, layers=layer, unroll=steps, remat=None if sets_remat else remat)
            )
        start += size * count
    if not has_single and len(parts) == 1:
        return cast(Repeat.Config, parts[0])
    return Sequence.Config(layers=tuple(parts), remat=remat if has_single else None)


def _longest(layers: tuple[Layer.Config, ...], start: int) -> tuple[int, int]:
    """(size, count) of the smallest repeated group that covers the most layers from `start` on."""
    best = (1, 1)
    for size in range(1, (len(layers) - start) // 2 + 1):
        group, count = layers[start : start + size], 1
        while layers[start + count * size : start + (count + 1) * size] == group:
            count += 1
        if count > 1 and size * count > best[0] * best[1]:
            best = (size, count)
    return best


def _call(layer: Layer, *args: Any) -> Any:  # Any: each layer has its own arguments and results
    return layer(*args)


def _has_remat(cfg: Layer.Config) -> bool:
    return any(getattr(node, "remat", None) is not None for _, node in walk(cfg))
