"""Mamba-2 as a layer (Dao and Gu 2024, arXiv 2405.21060, section 7)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import axcore as ax
from axcore.nn import Documents, Initializer, Linear, Ones, Recurrent, TokenInfo
from axcore.nn.matmul import rows
from axcore_mamba2.conv import CausalConv
from axcore_mamba2.initializers import LogRates, StepBias
from axcore_mamba2.norm import GatedRMSNorm
from axcore_mamba2.ssd import ssd


class Mamba2(Recurrent):
    """A selective state space model with a scalar decay per head, called like `axcore.nn.Attention`.

    The names are the paper's: in terms of attention, x is the value, B the key and C the query. Each has a separate
    projection, so that heads can be sharded. A published checkpoint has one matrix `in_proj` for z, x, B, C and dt, in
    this order, and one convolution for x, B and C.

    Documents of a packed row are separate: state and convolution restart where `segment_ids` change. Tokens that are
    not `valid`, before or after the tokens of a call, do not change the state.

    The values `query`, `key`, `value` and `heads` are tagged for remat policies.
    """

    class Config(Recurrent.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        state_dim: ax.PositiveInt = 128
        """Size of the state of each feature of a head."""
        layout_fields = ("chunk",)
        head_dim: ax.PositiveInt = 64
        expand: ax.PositiveInt = 2
        """The heads have `expand * input_dim` features in total."""
        num_groups: ax.PositiveInt = 1
        """Each group of consecutive heads shares B and C."""
        conv_width: ax.PositiveInt = 4
        chunk: ax.PositiveInt = 256
        """Tokens per chunk, which interact through a [chunk, chunk] matrix per head. Does not change the result."""
        z_proj: Linear.Config = Linear.Config()
        x_proj: Linear.Config = Linear.Config()
        B_proj: Linear.Config = Linear.Config()
        C_proj: Linear.Config = Linear.Config()
        dt_proj: Linear.Config = Linear.Config()
        x_conv: CausalConv.Config = CausalConv.Config()
        B_conv: CausalConv.Config = CausalConv.Config()
        C_conv: CausalConv.Config = CausalConv.Config()
        A_init: Initializer = LogRates()
        """Initializer of the logarithm of -A."""
        dt_init: Initializer = StepBias()
        """Initializer of the bias of dt, before the softplus."""
        D_init: Initializer = Ones()
        norm: ax.Layer.Config = GatedRMSNorm.Config()
        """Called as `(heads, z)`, both [batch, seq, expand * input_dim]. Receives `input_dim` and `groups`."""
        out_proj: Linear.Config = Linear.Config()

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        inner, shared = cfg.expand * cfg.input_dim, cfg.num_groups * cfg.state_dim
        if inner % cfg.head_dim:
            raise ax.ConfigError(
                f"expand * input_dim = {cfg.expand} * {cfg.input_dim} is not a multiple of head_dim={cfg.head_dim}"
            )
        num_heads = inner // cfg.head_dim
        if num_heads % cfg.num_groups:
            raise ax.ConfigError(
                f"the number of heads, expand * input_dim / head_dim = {num_heads}, is not a multiple of "
                f"num_groups={cfg.num_groups}"
            )

        def project(name: str, width: int, axis: str | None) -> Linear:
            wide = {"input_dim": cfg.input_dim, "output_dim": width, "axes": ("embed", axis)}
            return self.child(name, getattr(cfg, name), rngs, **wide)

        def convolve(name: str, width: int, axis: str | None) -> CausalConv:
            wide = {"input_dim": width, "width": cfg.conv_width, "axes": (None, axis)}
            return self.child(name, getattr(cfg, name), rngs, **wide)

        self.z_proj = project("z_proj", inner, "head")
        self.x_proj, self.x_conv = project("x_proj", inner, "head"), convolve("x_conv", inner, "head")
        self.B_proj, self.B_conv = project("B_proj", shared, None), convolve("B_conv", shared, None)
        self.C_proj, self.C_conv = project("C_proj", shared, None), convolve("C_conv", shared, None)
        self.dt_proj = project("dt_proj", num_heads, "head")
        self.A_log = self.param("A_log", (num_heads,), cfg.A_init, rngs, axes=("head",))
        self.dt_bias = self.param("dt_bias", (num_heads,), cfg.dt_init, rngs, axes=("head",))
        self.D = self.param("D", (num_heads,), cfg.D_init, rngs, axes=("head",))
        self.norm = self.child("norm", cfg.norm, rngs, input_dim=inner, groups=cfg.num_groups)
        wide = {"input_dim": inner, "output_dim": cfg.input_dim, "axes": ("head", "embed")}
        self.out_proj = self.child("out_proj", cfg.out_proj, rngs, **wide)
        shape = (num_heads, cfg.head_dim, cfg.state_dim)
        self.carry("state", shape, axes=("head", None, None))

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape."""
        cfg, flat, shape = self.config, rows(x), x.shape[:2]
        z, values, B, C, dt = (
            project(flat).reshape(*shape, -1)
            for project in (self.z_proj, self.x_proj, self.B_proj, self.C_proj, self.dt_proj)
        )

        def convolved(x: jax.Array, conv: CausalConv, *heads: int) -> jax.Array:
            return jax.nn.silu(conv(x, tokens)).reshape(*shape, *heads)

        values = checkpoint_name(convolved(values, self.x_conv, -1, cfg.head_dim), "value")
        B = checkpoint_name(convolved(B, self.B_conv, cfg.num_groups, cfg.state_dim), "key")
        C = checkpoint_name(convolved(C, self.C_conv, cfg.num_groups, cfg.state_dim), "query")
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))
        heads = self.recur(tokens, values, B, C, dt) + self.D[...].astype(jnp.float32)[:, None] * values
        heads = heads.astype(values.dtype).reshape(*shape, -1)
        return self.out_proj(self.norm(checkpoint_name(heads, "heads"), z))

    def advance(
        self, before: Mapping[str, jax.Array], documents: Documents, *inputs: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The heads [rows, width, head, head_dim] of some rows from values, B, C and step sizes."""
        values, B, C, dt = inputs
        A = -jnp.exp(self.A_log[...].astype(jnp.float32))
        dt = documents.only_tokens(dt)  # a step of size 0 does not change the state
        heads, state = ssd(values, dt, A, B, C, self.config.chunk, before["state"], documents.numbers)
        return heads, {"state": state}
