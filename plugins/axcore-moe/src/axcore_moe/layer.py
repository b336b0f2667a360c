"""A mixture of experts, in place of a feed-forward block."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import axcore as ax
from axcore.nn import FeedForward, Linear, TokenInfo
from axcore_moe.balance import LoadBalance, z_loss
from axcore_moe.dispatch import Dispatch
from axcore_moe.exchange import Exchange
from axcore_moe.experts import Experts
from axcore_moe.router import Router, TopK
from axcore_moe.routing import Routing


class LowLoadSteps(nnx.Variable[Any]):
    """int32 [experts]: the number of consecutive training steps (microbatches) in which each expert had a low load."""


class MoE(ax.Layer):
    """A router sends each token to a few of many feed-forward blocks (Shazeer et al. 2017, arXiv 1701.06538).

    It reports `max_load` and `min_load` (the largest and smallest load of an expert, as a multiple of the mean),
    `dropped` (the fraction of choices that no expert computed) and `dead_experts` (the number of dead experts).
    """

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        num_experts: ax.PositiveInt = ax.REQUIRED
        router: Router.Config = TopK.Config()
        experts: Experts.Config = Experts.Config()
        dispatch: Dispatch = Exchange()
        shared: FeedForward.Config | None = None
        """A block that processes every token (DeepSeekMoE, arXiv 2401.06066, section 3.2)."""
        shared_gate: Linear.Config | None = None
        """If given, the shared block's output is multiplied by the sigmoid of this map's one feature (Qwen2-MoE)."""
        balance: LoadBalance | None = None
        z_loss: ax.NonNegativeFloat = 0.0
        """Weight of the router's z-loss; 0 disables it."""
        dead_expert_threshold: ax.NonNegativeFloat = 0.1
        """A load below this fraction of the mean load is low."""
        dead_expert_steps: ax.PositiveInt = 100
        """Number of consecutive steps with a low load after which an expert counts as dead."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        if cfg.shared_gate is not None and cfg.shared is None:
            raise ax.ConfigError("shared_gate requires a shared block, but shared is None")
        widths = {"input_dim": cfg.input_dim, "num_experts": cfg.num_experts}
        self.router = self.child("router", cfg.router, rngs, **widths)
        self.experts = self.child("experts", cfg.experts, rngs, **widths)
        self.shared_block = self.child("shared_block", cfg.shared, rngs, input_dim=cfg.input_dim)
        narrow = {"input_dim": cfg.input_dim, "output_dim": 1, "axes": ("embed", None)}
        self.shared_gate = self.child("shared_gate", cfg.shared_gate, rngs, **narrow)
        self.low_load_steps = LowLoadSteps(jnp.zeros((cfg.num_experts,), jnp.int32))

    takes_tokens: ClassVar[bool] = True

    def __call__(self, x: jax.Array, tokens: TokenInfo | None = None) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape. Losses and loads leave out the padding in `tokens`."""
        cfg, flat = self.config, x.reshape(-1, x.shape[-1])
        routing = self.router(flat)
        if tokens is not None and (counted := tokens.counted) is not None:
            counted = jnp.broadcast_to(counted, x.shape[:2]).reshape(-1)
            routing = dataclasses.replace(routing, counted=counted)
        y, dropped = cfg.dispatch(self.experts, flat, routing)
        y = y.astype(self.dtypes.compute).reshape(x.shape)
        if self.training:
            self.router.learn(routing)
            self._report(routing, dropped, x.shape[0])
        if self.shared_block is None:
            return y
        shared = self.shared_block(x)
        return y + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared)

    def _report(self, routing: Routing, dropped: jax.Array, rows: int) -> None:
        cfg = self.config
        if cfg.balance is not None:
            loss = cfg.balance(routing, rows)
            self.add_loss("balance", loss.total, loss.count, loss.weight)
        if cfg.z_loss:
            loss = z_loss(routing, cfg.z_loss)
            self.add_loss("router_z_loss", loss.total, loss.count, loss.weight)
        counts = routing.counts().astype(jnp.float32)
        load = counts / jnp.maximum(counts.mean(), 1e-9)  # all of the tokens may be padding
        steps = jnp.where(load < cfg.dead_expert_threshold, self.low_load_steps[...] + 1, 0)
        self.low_load_steps[...] = steps
        self.add_summary("max_load", load.max())
        self.add_summary("min_load", load.min())
        self.add_summary("dropped", dropped)
        self.add_summary("dead_experts", (steps >= cfg.dead_expert_steps).sum().astype(jnp.float32))
        self.add_histogram("load", load)
