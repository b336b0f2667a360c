"""Which experts compute which tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Pairs of a token and an expert that computes it.

    Attributes:
        token: int32 [pairs].
        expert: int32 [pairs].
        weight: float32 [pairs], what the expert's output is multiplied with.
        probs: float32 [tokens, experts], non-negative scores that sum to 1 for each token; balance losses see them.
        logits: float32 [tokens, experts].
    """

    token: jax.Array
    expert: jax.Array
    weight: jax.Array
    probs: jax.Array
    logits: jax.Array

    @classmethod
    def of_choices(cls, chosen: jax.Array, weights: jax.Array, probs: jax.Array, logits: jax.Array) -> Routing:
        """From each token's choices, int and float32 [tokens, k], best first. The pairs are ordered by rank of choice:
        where places are few, no second choice takes that of a first."""
        tokens, k = chosen.shape
        token = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (k, tokens))
        return cls(token.reshape(-1), chosen.T.reshape(-1).astype(jnp.int32), weights.T.reshape(-1), probs, logits)

    @property
    def num_experts(self) -> int:
        return self.probs.shape[1]

    def counts(self) -> jax.Array:
        """int32 [experts]: how many tokens each expert computes."""
        return jnp.zeros((self.num_experts,), jnp.int32).at[self.expert].add(1)
