"""The assignment of tokens to experts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Pairs of a token and an expert that processes it.

    Attributes:
        token: int32 [pairs].
        expert: int32 [pairs].
        weight: float32 [pairs], the factors of the experts' outputs.
        probs: float32 [tokens, experts], non-negative scores that sum to 1 for each token, for balance losses.
        logits: float32 [tokens, experts].
        counted: bool [tokens], false at padding, which losses and counts leave out; None if there is no padding.
        choices: number of pairs of each token, if it is equal for all tokens and their experts are distinct. The pairs
            are then the first choices of all tokens, followed by the second choices, and so on. If None, the pairs are
            in any order.
    """

    token: jax.Array
    expert: jax.Array
    weight: jax.Array
    probs: jax.Array
    logits: jax.Array
    counted: jax.Array | None = None
    choices: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of_choices(cls, chosen: jax.Array, weights: jax.Array, probs: jax.Array, logits: jax.Array) -> Routing:
        """Creates a routing from each token's choices, int and float32 [tokens, k], best first. With limited capacity,
        first choices take precedence over second choices."""
        tokens, k = chosen.shape
        token = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (k, tokens))
        expert, weight = chosen.T.reshape(-1).astype(jnp.int32), weights.T.reshape(-1)
        return cls(token.reshape(-1), expert, weight, probs, logits, choices=k)

    @property
    def num_experts(self) -> int:
        return self.probs.shape[1]

    def counts(self) -> jax.Array:
        """int32 [experts]: the number of tokens of each expert, without padding."""
        expert = self.expert
        if self.counted is not None:
            expert = jnp.where(self.counted[self.token], expert, self.num_experts)
        return counts(expert, self.num_experts)

    def gather(self, x: jax.Array) -> jax.Array:
        """The token of each pair: [tokens, features] -> [pairs, features]."""
        if self.choices is None:
            return x[self.token]
        return jnp.broadcast_to(x, (self.choices, *x.shape)).reshape(-1, x.shape[1])

    def combine(self, y: jax.Array) -> jax.Array:
        """The weighted sum of each token's outputs: [pairs, features] -> [tokens, features]."""
        return self.total(y * self.weight[:, None].astype(y.dtype))

    def total(self, y: jax.Array) -> jax.Array:
        """The sum of each token's outputs: [pairs, features] -> [tokens, features]."""
        if self.choices is None:
            return jnp.zeros((self.probs.shape[0], y.shape[1]), y.dtype).at[self.token].add(y)
        return y.reshape(self.choices, -1, y.shape[1]).sum(axis=0)


def counts(expert: jax.Array, num_experts: int) -> jax.Array:
    """int32 [pairs] -> int32 [experts]: the count of each expert. Values of `num_experts` or more are ignored."""
    return jnp.zeros((num_experts,), jnp.int32).at[expert].add(1, mode="drop")


@jax.custom_vjp
def permute_rows(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """`y[i] = x[source[i]]`, zeros where the source is out of range: [n, features] -> [m, features].

    The gradient is also a gather. Without the custom rule it would be a scatter-add, which is several times slower.

    Args:
        source: int32 [m]. Values in range are unique.
        target: int32 [n], the destination of each row; m or more if it has none.
    """
    return x.at[source].get(mode="fill", fill_value=0)


def _forward(x: jax.Array, source: jax.Array, target: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return permute_rows(x, source, target), (source, target)


def _backward(residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None, None]:
    source, target = residuals
    return permute_rows(g, target, source), None, None


permute_rows.defvjp(_forward, _backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowAssignment:
    """The assignment of (token, expert) pairs to rows that are grouped by expert.

    Attributes:
        pair: int32 [rows], the pair in each row; the number of pairs for an empty row.
        row: int32 [pairs], the row of each pair; the number of rows for a pair without one.
    """

    pair: jax.Array
    row: jax.Array

    @classmethod
    def of(cls, expert: jax.Array, starts: jax.Array, rows: int, capacity: int | None = None) -> RowAssignment:
        """Assigns the pairs of each expert, in order, to the rows from its start on.

        Args:
            expert: int32 [pairs]; `starts.size` for pairs without a row.
            starts: int32 [experts].
            rows: number of rows.
            capacity: maximum number of rows per expert. Further pairs get no row. None means unlimited.
        """
        pairs = expert.size
        order = jnp.argsort(expert, stable=True)
        expert, starts = expert[order], jnp.append(starts, rows)
        first = jnp.searchsorted(expert, jnp.arange(starts.size), side="left")
        position = jnp.arange(pairs) - first[expert]  # among the pairs of its expert
        found = jnp.minimum(starts[expert] + position, rows)
        if capacity is not None:
            found = jnp.where(position < capacity, found, rows)
        row = jnp.zeros((pairs,), jnp.int32).at[order].set(found.astype(jnp.int32), unique_indices=True)
        pair = jnp.full((rows,), pairs, jnp.int32).at[row].set(np.arange(pairs, dtype=np.int32), mode="drop")
        return cls(pair, row)

    def permute(self, x: jax.Array) -> jax.Array:
        """[pairs, features] -> [rows, features]. With fewer tokens than pairs, [tokens, features], the pairs are the
        first choices of all tokens, then the second choices, and so on."""
        if x.shape[0] != self.row.size:
            x = jnp.broadcast_to(x, (self.row.size // x.shape[0], *x.shape)).reshape(-1, x.shape[1])
        return permute_rows(x, self.pair, self.row)

    def unpermute(self, rows: jax.Array) -> jax.Array:
        """[rows, features] -> [pairs, features]."""
        return permute_rows(rows, self.row, self.pair)
