"""Losses that balance the load of experts."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from axcore.config import Config, NonNegativeFloat
from axcore.module import LossSum
from axcore.parallel import active_layout
from axcore_moe.routing import Routing


class LoadBalance(Config):
    """`weight * num_experts * sum_i f_i P_i`, where f_i is the mean number of choices of expert i per token and P_i its
    mean probability (Switch Transformers, arXiv 2101.03961, eq. 4-6). Padding is left out.

    Each layer adds its own loss, so the sum grows with the number of layers. `transformers` computes one loss from the
    means over the tokens of all layers. To train with a similar strength, divide its `router_aux_loss_coef` by the
    number of layers."""

    weight: NonNegativeFloat
    scope: Literal["sequence", "batch", "global"] = "global"
    """The means are taken over one row (`sequence`: DeepSeek-V3, arXiv 2412.19437, eq. 17-20), the rows of one shard of
    the batch (`batch`), or all rows of the microbatch (`global`: Qiu et al. 2025, arXiv 2501.11873). The loss is
    averaged over rows or shards. With `Trainer.Config.microbatches`, the losses of `batch` and `global` are averaged
    over the microbatches of a step, so they differ from the losses of the whole batch."""
    per_choice: bool = False
    """Whether f is divided by the number of choices per token, as in DeepSeek-V3."""

    def __call__(self, routing: Routing, rows: int) -> LossSum:
        """The loss, summed over the parts of its scope. The tokens of `routing` are `rows` concatenated rows."""
        tokens, experts = routing.probs.shape
        chosen = jnp.zeros((tokens, experts), jnp.float32).at[routing.token, routing.expert].add(1.0)
        parts = {"sequence": rows, "batch": math.gcd(rows, _shards()), "global": 1}[self.scope]
        counted = _counted(routing)
        sizes = counted.reshape(parts, -1).sum(axis=1)
        share = (counted.reshape(parts, -1) / jnp.maximum(sizes, 1)[:, None]).reshape(-1, 1)
        fractions = (chosen * share).reshape(parts, -1, experts).sum(axis=1)
        probs = (routing.probs * share).reshape(parts, -1, experts).sum(axis=1)
        total = experts * (fractions * probs).sum()
        total = total / (routing.expert.size / tokens) if self.per_choice else total
        return LossSum(total, (sizes > 0).sum(dtype=jnp.float32), self.weight)  # a row of padding has no loss


def z_loss(routing: Routing, weight: float) -> LossSum:
    """The squared log-partition of the logits, a mean over tokens without padding (ST-MoE, arXiv 2202.08906, eq. 5)."""
    counted = _counted(routing)
    squares = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1)) * counted
    return LossSum(squares.sum(), counted.sum(), weight)


def _counted(routing: Routing) -> jax.Array:
    """float32 [tokens]: 0 at padding, otherwise 1."""
    if routing.counted is None:
        return jnp.ones(routing.probs.shape[:1], jnp.float32)
    return routing.counted.astype(jnp.float32)


def _shards() -> int:
    """The number of shards of the batch."""
    layout = active_layout()
    if layout is None:
        return 1
    axes = layout.spec(("batch",))[0]
    sizes = dict(layout.mesh.shape)
    return math.prod(sizes[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))
