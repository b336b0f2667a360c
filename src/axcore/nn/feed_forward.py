"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from axcore.config import REQUIRED, Config, ConfigError, Fraction, PositiveFloat, PositiveInt
from axcore.module import Layer, Rngs
from axcore.nn import activations  # noqa: F401 - registers their names
from axcore.nn.dropout import dropout
from axcore.nn.fusing import Fusion
from axcore.nn.linear import Linear
from axcore.nn.matmul import rows
from axcore.parallel import constrain


class Gating(Config):
    """Base of the functions that replace `activation(gate) * up`."""

    def __call__(self, gate: Float[Array, "*shape mlp"], up: Float[Array, "*shape mlp"]) -> Float[Array, "*shape mlp"]:
        """The hidden features."""
        raise NotImplementedError


class ClampedSwiGLU(Gating):
    """`(clip(up) + 1) * g * sigmoid(alpha * g)` with g = min(gate, limit): the experts of gpt-oss (OpenAI 2025, arXiv
    2508.10925, section 2.2, and its published code)."""

    alpha: PositiveFloat = 1.702
    limit: PositiveFloat = 7.0

    def __call__(self, gate: Float[Array, "*shape mlp"], up: Float[Array, "*shape mlp"]) -> Float[Array, "*shape mlp"]:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class FeedForward(Layer):
    """`down(activation(gate(x)) * up(x))`, SwiGLU by default (Shazeer 2020, arXiv 2002.05202, eq. 6).

    The values `gate` and `up` are tagged for remat policies.
    """

    class Config(Layer.Config):
        input_dim: PositiveInt = REQUIRED
        hidden_dim: PositiveInt = REQUIRED
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
        gate: Linear.Config | None = Linear.Config()
        """None: a plain block, `down(activation(up(x)))`."""
        up: Linear.Config | None = Linear.Config()
        gate_up: Linear.Config | None = None
        """One fused projection that replaces gate and up, which must then be None. Its columns alternate between the
        two, so tensor parallelism can split it."""
        down: Linear.Config = Linear.Config()
        gating: Gating | None = None
        """How gate and up combine; None: `activation(gate) * up`."""
        dropout: Fraction = 0.0
        """Probability of zeroing each hidden feature while training."""

        def fusion(self) -> Fusion | None:
            """Computes gate and up in one product. None: they are not equal, or fused already."""
            if self.gate is None or self.gate != self.up or self.hidden_dim is REQUIRED:
                return None
            return Fusion(self.set(gate_up=self.up, gate=None, up=None), ("gate", "up"), "gate_up", self.hidden_dim)

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        _check_projections(cfg)
        wide = {"input_dim": cfg.input_dim, "output_dim": cfg.hidden_dim, "axes": ("embed", "mlp")}
        self.gate = self.child("gate", cfg.gate, rngs, **wide)
        self.up = self.child("up", cfg.up, rngs, **wide)
        self.gate_up = self.child("gate_up", cfg.gate_up, rngs, **wide | {"output_dim": 2 * cfg.hidden_dim})
        narrow = {"input_dim": cfg.hidden_dim, "output_dim": cfg.input_dim, "axes": ("mlp", "embed")}
        self.down = self.child("down", cfg.down, rngs, **narrow)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Applies the block to each token."""
        cfg = self.config
        gate, up = self._gate_and_up(rows(x))
        gate = None if gate is None else checkpoint_name(gate, "gate")
        hidden = combined(cfg, gate, checkpoint_name(up, "up"))
        hidden = constrain(hidden, *("batch", "seq")[: hidden.ndim - 1], "mlp")
        return self.down(dropout(self, hidden, cfg.dropout)).reshape(x.shape)

    def _gate_and_up(
        self, x: Float[Array, "*shape embed"]
    ) -> tuple[Float[Array, "*shape mlp"] | None, Float[Array, "*shape mlp"]]:
        if self.gate_up is None:
            return None if self.gate is None else self.gate(x), self.up(x)
        both = self.gate_up(x).reshape(*x.shape[:-1], self.config.hidden_dim, 2)
        return both[..., 0], both[..., 1]


def _check_projections(cfg: FeedForward.Config) -> None:
    """Raises a ConfigError unless the projections compute the hidden features exactly once."""
    separate = [name for name in ("gate", "up") if getattr(cfg, name) is not None]
    if cfg.gate_up is not None and separate:
        raise ConfigError(f"gate_up computes gate and up in one product; set {' and '.join(separate)} to None")
    if cfg.gate_up is None and cfg.up is None:
        raise ConfigError("up and gate_up are both None; set up, or set gate_up to compute gate and up in one product")
    if cfg.gate is None and cfg.gate_up is None and cfg.gating is not None:
        raise ConfigError(f"gating={cfg.gating!r} requires a gate, got gate=None; set gate or remove gating")


def combined(
    cfg: FeedForward.Config, gate: Float[Array, "*shape mlp"] | None, up: Float[Array, "*shape mlp"]
) -> Float[Array, "*shape mlp"]:
    """The hidden features of a block with this config, from the outputs of its gate (if any) and up projections."""
    if gate is None:
        return cfg.activation(up)
    return cfg.activation(gate) * up if cfg.gating is None else cfg.gating(gate, up)
