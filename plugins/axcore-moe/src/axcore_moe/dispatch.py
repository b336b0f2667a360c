"""How tokens get to their experts and back."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.config import Config
from axcore.nn import Blocks, GroupedMatmul
from axcore_moe.experts import Experts
from axcore_moe.routing import Layout, Routing, counts


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

    matmul: GroupedMatmul = Blocks()

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        y = by_expert(experts, routing.spread(x), routing.expert, routing.num_experts, self.matmul)
        return routing.summed(y), jnp.zeros(())


def by_expert(experts: Experts, x: jax.Array, expert: jax.Array, num_experts: int, matmul: GroupedMatmul) -> jax.Array:
    """Each row by its expert, in any order: [rows, input_dim] -> the same shape.

    Args:
        expert: int32 [rows]; `num_experts` where no expert computes the row, which becomes zeros.
    """
    rows = expert.size
    align = matmul.align(rows, num_experts)
    sizes = -(-counts(expert, num_experts) // align) * align
    ends = jnp.cumulative_sum(sizes)
    blocks = rows if align == 1 else -(-rows // align) + min(rows, num_experts)
    layout = Layout.of(expert, ends - sizes, blocks * align)
    of_block = jnp.searchsorted(ends, align * jnp.arange(blocks), side="right")
    group = jnp.minimum(of_block, num_experts - 1).astype(jnp.int32)  # empty blocks at the end are somebody's
    return layout.pairs_of(experts.grouped(layout.rows_of(x), group, sizes, matmul))


class Capacity(Dispatch):
    """Each expert has places for `factor` times its fair share; what finds none is dropped: the token passes by on the
    residual (GShard, arXiv 2006.16668; Switch Transformers, arXiv 2101.03961, section 2.2).

    What a token gets then depends on the tokens around it, while decoding too. Parameters are those of the other
    dispatches, so a model that was trained with it can be served with `Dropless`.
    """

    factor: float = 1.25

    def __post_init__(self) -> None:
        if self.factor is not ax.REQUIRED and not 0 < self.factor < math.inf:
            raise ax.ConfigError(f"Capacity.factor must be positive and finite, not {self.factor}")

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        pairs, count = routing.expert.size, routing.num_experts
        places = min(pairs, max(1, math.ceil(self.factor * pairs / count)))
        layout = Layout.of(routing.expert, jnp.arange(count) * places, count * places, places)
        buffer = layout.rows_of(routing.spread(x)).reshape(count, places, -1)
        y = layout.pairs_of(experts.batched(buffer).reshape(count * places, -1))
        return routing.summed(y), jnp.mean(layout.row == count * places, dtype=jnp.float32)
