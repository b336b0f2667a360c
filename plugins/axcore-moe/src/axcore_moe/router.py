"""Routers, which choose experts for tokens."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import axcore as ax
from axcore.nn import KVCache, Linear
from axcore_moe.routing import Routing


class Router(ax.Layer):
    """Base class of routers."""

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        num_experts: ax.PositiveInt = ax.REQUIRED
        linear: Linear.Config = Linear.Config(dtypes=ax.DTypes(compute=jnp.float32))
        """Computes the logits in float32, since small differences change the choice of experts."""
        jitter: ax.Fraction = 0.0
        """In training, the input is multiplied by random factors from 1 - jitter to 1 + jitter (Switch Transformers,
        arXiv 2101.03961, section 2.4)."""

    config: Any

    def make_linear(self, cfg: Config, rngs: ax.Rngs) -> None:
        wide = {"input_dim": cfg.input_dim, "output_dim": cfg.num_experts}
        self.linear = self.child("linear", cfg.linear, rngs, **wide, axes=("embed", None))

    def logits(self, x: jax.Array) -> jax.Array:
        """[tokens, input_dim] -> float32 [tokens, experts]."""
        jitter = self.config.jitter
        if jitter and self.training:
            x = x * jax.random.uniform(self.rng("jitter"), x.shape, x.dtype, 1 - jitter, 1 + jitter)
        return self.linear(x).astype(jnp.float32)

    def __call__(self, x: jax.Array) -> Routing:
        """Routes tokens [tokens, input_dim]."""
        raise NotImplementedError

    def learn(self, routing: Routing) -> None:
        """Updates state other than parameters after a training step, from a routing that `__call__` returned."""


class SelectionBias(nnx.Variable[Any]):
    """float32 [experts], added to the scores for the choice of experts. Not a parameter: it has no gradient."""


class TopK(Router):
    """Each token chooses the experts with the highest scores (Shazeer et al. 2017, arXiv 1701.06538).

    With groups, experts are chosen only from the best groups. The score of a group is the sum of its two highest scores
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    class Config(Router.Config):
        top_k: ax.PositiveInt = 2
        """Experts per token."""
        score: Literal["softmax", "sigmoid"] = "softmax"
        normalize: bool = True
        """Whether the weights of the chosen experts are divided by their sum. With softmax scores, True gives the
        softmax over the chosen logits (Mixtral) and False the softmax over all logits (Qwen2-MoE)."""
        scale: ax.PositiveFloat = 1.0
        """Multiplies the weights."""
        groups: ax.PositiveInt = 1
        top_groups: ax.PositiveInt = 1
        bias_rate: ax.NonNegativeFloat | None = None
        """If given, a bias is added to the scores for the choice only. Each training step raises it by this amount for
        experts below the mean load and lowers it for others (Wang et al. 2024, arXiv 2408.15664, alg. 1)."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        self.make_linear(cfg, rngs)
        if cfg.num_experts % cfg.groups:
            raise ax.ConfigError(f"num_experts={cfg.num_experts} does not divide into groups={cfg.groups}")
        if cfg.top_groups > cfg.groups:
            raise ax.ConfigError(f"top_groups={cfg.top_groups} exceeds groups={cfg.groups}")
        available = cfg.num_experts // cfg.groups * cfg.top_groups
        if cfg.top_k > available:
            where = "" if cfg.groups == 1 else f" of top_groups={cfg.top_groups}"
            raise ax.ConfigError(f"top_k={cfg.top_k} exceeds the {available} available experts{where}")
        self.bias = nnx.data(None)
        if cfg.bias_rate is not None:
            self.bias = SelectionBias(jnp.zeros((cfg.num_experts,), jnp.float32))

    def __call__(self, x: jax.Array) -> Routing:
        cfg, logits = self.config, self.logits(x)
        if cfg.score == "softmax":
            scores = probs = jax.nn.softmax(logits, axis=-1)
        else:
            scores = jax.nn.sigmoid(logits)
            probs = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
        by = scores if self.bias is None else scores + self.bias[...]
        chosen = jax.lax.top_k(self._of_best_groups(jax.lax.stop_gradient(by)), cfg.top_k)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if cfg.normalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return Routing.of_choices(chosen, weights * cfg.scale, probs, logits)

    def learn(self, routing: Routing) -> None:
        rate = self.config.bias_rate
        if self.bias is not None and rate is not None:
            load = routing.counts().astype(jnp.float32)
            self.bias[...] = self.bias[...] + rate * jnp.sign(load.mean() - load)

    def _of_best_groups(self, scores: jax.Array) -> jax.Array:
        """The scores, with minus infinity for experts outside of the best groups."""
        cfg = self.config
        if cfg.groups == cfg.top_groups:
            return scores
        grouped = scores.reshape(scores.shape[0], cfg.groups, -1)
        best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        chosen = jax.nn.one_hot(jax.lax.top_k(best, cfg.top_groups)[1], cfg.groups, dtype=bool).any(axis=1)
        return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)


class ExpertChoice(Router):
    """Each expert chooses an equal number of tokens, those with the highest scores (Zhou et al. 2022, arXiv
    2202.09368).

    **Expert choice is not causal.** Whether a token is chosen depends on later tokens and on other rows. A causal model
    trained with expert choice leaks information from later tokens and cannot decode. Use it for encoders.
    """

    class Config(Router.Config):
        capacity_factor: ax.PositiveFloat = 2.0
        """Mean number of experts per token."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> Router.Config:
            raise ax.ConfigError(
                "expert choice routes a token depending on later tokens, so it cannot decode. Use the router TopK."
            )

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        self.make_linear(cfg, rngs)
        if cfg.capacity_factor > cfg.num_experts:
            raise ax.ConfigError(f"capacity_factor={cfg.capacity_factor} exceeds num_experts={cfg.num_experts}")

    def __call__(self, x: jax.Array) -> Routing:
        logits = self.logits(x)
        probs = jax.nn.softmax(logits, axis=-1)
        tokens, experts = probs.shape
        count = min(tokens, max(1, math.ceil(self.config.capacity_factor * tokens / experts)))
        weight, token = jax.lax.top_k(probs.T, count)
        expert = jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32)[:, None], token.shape)
        return Routing(token.reshape(-1).astype(jnp.int32), expert.reshape(-1), weight.reshape(-1), probs, logits)
