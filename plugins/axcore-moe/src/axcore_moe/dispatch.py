"""Dispatching tokens to their experts and combining the outputs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.config import Config
from axcore.module import current
from axcore.nn import Blocks, GroupedMatmul
from axcore.nn.grouped_choice import choose_grouped
from axcore.parallel import check_gathers
from axcore_moe.experts import Experts
from axcore_moe.routing import Routing, RowAssignment, counts

_ADVICE = "Use dispatch=Exchange(), or set all but one of them to 1"


class Dispatch(Config):
    """Base class of dispatches. All compute the same sum at different costs. Some drop tokens if an expert exceeds its
    capacity."""

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """The sum over each token's experts of weight times output.

        Args:
            x: [tokens, input_dim].

        Returns:
            [tokens, input_dim]; and the fraction of (token, expert) pairs that were dropped, a float32 scalar.
        """
        raise NotImplementedError


class Dense(Dispatch):
    """Applies every expert to every token. This is the reference; its cost grows with the number of experts."""

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        weights = jnp.zeros(routing.probs.shape, jnp.float32).at[routing.token, routing.expert].add(routing.weight)
        outputs = experts.batched(jnp.broadcast_to(x, (routing.num_experts, *x.shape)))
        return jnp.einsum("end,ne->nd", outputs, weights.astype(outputs.dtype)), jnp.zeros(())


class Dropless(Dispatch):
    """Sorts tokens by expert and computes grouped products, without dropping tokens (MegaBlocks, Gale et al. 2022,
    arXiv 2211.15841)."""

    matmul: GroupedMatmul = Blocks()

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        check_gathers("a mixture of experts with this dispatch", _ADVICE)
        tokens = routing.gather(x) if routing.choices is None else x
        y = by_expert(experts, tokens, routing.expert, routing.num_experts, self.matmul, routing.weight)
        return routing.total(y), jnp.zeros(())


def by_expert(
    experts: Experts,
    x: jax.Array,
    expert: jax.Array,
    num_experts: int,
    matmul: GroupedMatmul,
    weight: jax.Array | None = None,
) -> jax.Array:
    """Applies the expert of each pair to its token.

    Args:
        x: [tokens, input_dim]; see `RowAssignment.permute` for the order of the pairs.
        expert: int32 [pairs]; `num_experts` for pairs without an expert, whose result is zeros.
        matmul: see `axcore.nn.FirstSupported` for several in order.
        weight: float32 [pairs], a factor of each result; None: 1.

    Returns:
        [pairs, input_dim].

    Raises:
        ConfigError: `matmul` does not support the products.
    """
    matmul = choose_grouped(matmul, experts.requests(), f"{current().path}.dispatch.matmul".removeprefix("."))
    rows = expert.size
    align = matmul.align(rows, num_experts)
    sizes = -(-counts(expert, num_experts) // align) * align
    ends = jnp.cumulative_sum(sizes)
    blocks = rows if align == 1 else -(-rows // align) + min(rows, num_experts)
    assignment = RowAssignment.of(expert, ends - sizes, blocks * align)
    of_block = jnp.searchsorted(ends, align * jnp.arange(blocks), side="right")
    group = jnp.minimum(of_block, num_experts - 1).astype(jnp.int32)  # unused blocks at the end need a valid group
    return assignment.unpermute(experts.grouped(x, assignment, group, sizes, matmul, weight))


class Capacity(Dispatch):
    """Each expert has a capacity of `factor` times its fair share of pairs. Pairs beyond it are dropped: their tokens
    keep only the residual (GShard, arXiv 2006.16668; Switch Transformers, arXiv 2101.03961, section 2.2).

    The output of a token then depends on other tokens, also while decoding. All dispatches use the same parameters, so
    a model that was trained with `Capacity` can be served with `Dropless`.
    """

    factor: ax.PositiveFloat = 1.25

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        check_gathers("a mixture of experts with this dispatch", _ADVICE)
        pairs, count = routing.expert.size, routing.num_experts
        capacity = min(pairs, max(1, math.ceil(self.factor * pairs / count)))
        assignment = RowAssignment.of(routing.expert, jnp.arange(count) * capacity, count * capacity, capacity)
        buffer = assignment.permute(routing.gather(x)).reshape(count, capacity, -1)
        y = assignment.unpermute(experts.batched(buffer).reshape(count * capacity, -1))
        return routing.combine(y), jnp.mean(assignment.row == count * capacity, dtype=jnp.float32)
