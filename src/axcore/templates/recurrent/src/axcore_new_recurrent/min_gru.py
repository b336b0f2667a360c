"""A recurrent layer whose gates depend on the current token only: minGRU (Feng et al. 2024, arXiv 2410.01201)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import BaseAttention, Documents, Linear, Recurrent, TokenInfo


class MinGRU(Recurrent):
    """`projection(h)` with `h_t = (1 - z_t) h_{t-1} + z_t c_t`, where `z_t = sigmoid(gate(x_t))` and `c_t =
    candidate(x_t)`. The recurrence is in float32."""

    class Config(Recurrent.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        hidden_dim: ax.PositiveInt | None = None
        """Features of h; None: input_dim."""
        gate: Linear.Config = Linear.Config(use_bias=True)
        candidate: Linear.Config = Linear.Config()
        projection: Linear.Config = Linear.Config()

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        hidden = cfg.hidden_dim or cfg.input_dim
        widths = {"input_dim": cfg.input_dim, "output_dim": hidden, "axes": ("embed", "mlp")}
        self.gate = self.child("gate", cfg.gate, rngs, **widths)
        self.candidate = self.child("candidate", cfg.candidate, rngs, **widths)
        widths = {"input_dim": hidden, "output_dim": cfg.input_dim, "axes": ("mlp", "embed")}
        self.projection = self.child("projection", cfg.projection, rngs, **widths)
        self.carry("hidden", (hidden,), axes=("mlp",))

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape."""
        y: jax.Array = self.projection(self.recur(tokens, self.gate(x), self.candidate(x)))
        return y

    def advance(
        self, before: Mapping[str, jax.Array], documents: Documents, *inputs: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """h of some rows, [rows, width, hidden], from the gates and candidates."""
        gate, candidate = inputs
        z = jax.nn.sigmoid(gate.astype(jnp.float32))
        kept, added = 1 - z, documents.only_tokens(z * candidate.astype(jnp.float32))
        if documents.numbers is not None:  # the first token of a document keeps nothing of the one before
            begins = jnp.diff(documents.numbers, axis=1, prepend=0) > 0
            kept = jnp.where(begins[..., None], 0, kept)
        if documents.valid is not None:  # padding keeps everything
            kept = jnp.where(documents.valid[..., None], kept, 1)

        def both(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            return first[0] * second[0], first[1] * second[0] + second[1]

        kept, added = jax.lax.associative_scan(both, (kept, added), axis=1)
        hidden = kept * before["hidden"][:, None] + added
        return hidden.astype(candidate.dtype), {"hidden": hidden[:, -1]}


def use_min_gru(cfg: ax.Config, where: ax.Where = BaseAttention, hidden_dim: int | None = None) -> ax.Config:
    """Replaces every selected attention with minGRU.

    Args:
        where: selects attention layers.
        hidden_dim: the features of its state; None: as many as the layer has inputs.
    """
    return ax.select(cfg, where).map(lambda path, attention: MinGRU.Config(hidden_dim=hidden_dim))
