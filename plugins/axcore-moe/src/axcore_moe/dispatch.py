"""How tokens get to their experts and back."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.config import Config
from axcore_moe.experts import Experts
from axcore_moe.matmul import GroupedMatmul, RaggedDot
from axcore_moe.routing import Routing


class Dispatch(Config):
    """Base of dispatches. All compute the same sum; they differ in cost, and in what happens when an expert is full."""

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """The sum over each token's experts of weight times output.

        Args:
            x: [tokens, input_dim].

        Returns:
            [tokens, input_dim]; and the share of the pairs that no expert computed, a float32 scalar.
        """
        raise NotImplementedError


class Dense(Dispatch):
    """Every expert computes every token, and weights choose afterwards: the reference. Its cost grows with the number
    of experts."""

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        weights = jnp.zeros(routing.probs.shape, jnp.float32).at[routing.token, routing.expert].add(routing.weight)
        outputs = experts.batched(jnp.broadcast_to(x, (routing.num_experts, *x.shape)))
        return jnp.einsum("end,ne->nd", outputs, weights.astype(outputs.dtype)), jnp.zeros(())


class Dropless(Dispatch):
    """Tokens are sorted by expert and multiplied in groups; none is dropped (MegaBlocks, Gale et al. 2022, arXiv
    2211.15841)."""

    matmul: GroupedMatmul = RaggedDot()

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(routing.expert, stable=True)
        token, expert = routing.token[order], routing.expert[order]
        y = experts.grouped(x[token], expert, routing.counts(), self.matmul)
        return _summed(y, token, routing.weight[order], x), jnp.zeros(())


class Capacity(Dispatch):
    """Each expert has places for `factor` times its fair share; what finds none is dropped: the token passes by on the
    residual (GShard, arXiv 2006.16668; Switch Transformers, arXiv 2101.03961, section 2.2)."""

    factor: float = 1.25

    def __post_init__(self) -> None:
        if self.factor is not ax.REQUIRED and not self.factor > 0:
            raise ax.ConfigError(f"Capacity.factor must be positive, not {self.factor}")

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        pairs, count = routing.expert.size, routing.num_experts
        places = min(pairs, max(1, math.ceil(self.factor * pairs / count)))
        order = jnp.argsort(routing.expert, stable=True)
        token, expert = routing.token[order], routing.expert[order]
        starts = jnp.cumulative_sum(routing.counts(), include_initial=True)[:-1]
        place = jnp.arange(pairs) - starts[expert]  # among the tokens of its expert
        buffer = jnp.zeros((count, places, x.shape[1]), x.dtype).at[expert, place].set(x[token], mode="drop")
        y = experts.batched(buffer).at[expert, place].get(mode="fill", fill_value=0)
        return _summed(y, token, routing.weight[order], x), jnp.mean(place >= places, dtype=jnp.float32)


def _summed(y: jax.Array, token: jax.Array, weight: jax.Array, x: jax.Array) -> jax.Array:
    """Outputs [pairs, input_dim] times their weights, added up by token."""
    return jnp.zeros((x.shape[0], y.shape[1]), y.dtype).at[token].add(y * weight[:, None].astype(y.dtype))
