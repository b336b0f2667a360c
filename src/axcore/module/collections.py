"""What the layers of one call report: summaries, losses, and outputs that somebody asked for."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Kind(enum.StrEnum):
    """What a summary's value is."""

    SCALAR = "scalar"
    """[]"""
    HISTOGRAM = "histogram"
    """[2, bins]: counts, and the upper edges of the bins; the lowest edge is the first upper edge minus one width."""
    IMAGE = "image"
    """[height, width, channels], 0 to 1."""


class Reduce(enum.StrEnum):
    """How values of one summary become one, over mapped examples, devices or accumulated batches."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"

    def over(self, values: jax.Array, axis: int = 0) -> jax.Array:
        if self is Reduce.LAST:
            return jnp.take(values, -1, axis)
        return getattr(jnp, self.value)(values, axis=axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summary:
    """A reported value. In a scanned stack it has a leading axis over the layers."""

    value: jax.Array
    kind: Kind = dataclasses.field(default=Kind.SCALAR, metadata={"static": True})
    reduce: Reduce = dataclasses.field(default=Reduce.MEAN, metadata={"static": True})

    def __float__(self) -> float:
        return float(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSum:
    """A loss as a sum and the count that divides it, so that the losses of parts of a batch can be added.

    Attributes:
        total, count: float32 scalars; [layer] in a scanned stack.
        weight: factor of `total / count` in the objective.
    """

    total: jax.Array
    count: jax.Array
    weight: float = dataclasses.field(default=1.0, metadata={"static": True})

    def mean(self, count: jax.Array | None = None) -> jax.Array:
        """`weight * total / count`, or 0 if the count is 0.

        Args:
            count: divides instead of `self.count`, such as the count of the whole batch for the sum of a microbatch.
        """
        count = jax.lax.stop_gradient(self.count if count is None else count)
        return self.weight * self.total / jnp.where(count == 0, 1.0, count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Collections:
    """What the layers of one call reported, by `path.name`.

    A layer that ran in a scanned stack reports under `*`, with a leading axis over the layers: `decoder.layers.*.norm`.
    `labelled` spells such entries out.

    Attributes:
        summaries: values for people.
        losses: terms of the objective besides the main loss.
        outputs: values that `invoke(capture=...)` asked for.
    """

    summaries: dict[str, Summary] = dataclasses.field(default_factory=dict)
    losses: dict[str, LossSum] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def reduced(self) -> Collections:
        """Reduces the leading axis over examples, devices or microbatches: summaries by their rule, totals and counts
        of losses by their sum."""
        summaries = {
            path: dataclasses.replace(summary, value=summary.reduce.over(summary.value))
            for path, summary in self.summaries.items()
        }
        return Collections(summaries, jax.tree.map(lambda leaf: leaf.sum(axis=0), self.losses), self.outputs)

    def scalars(self) -> dict[str, jax.Array]:
        """The values of scalar summaries, for a step's metrics."""
        return {path: summary.value for path, summary in self.summaries.items() if summary.kind is Kind.SCALAR}

    def weighted_losses(self) -> dict[str, jax.Array]:
        """`weight * total / count` of each loss, for a step's metrics."""
        return {path: loss.mean() for path, loss in self.losses.items()}

    def total_loss(self, counts: Mapping[str, jax.Array] | None = None) -> jax.Array | float:
        """The sum of all weighted losses, including those of stacked layers.

        Args:
            counts: path -> count of the whole batch, if these losses are those of a microbatch.
        """
        means = (loss.mean(None if counts is None else counts[path]) for path, loss in self.losses.items())
        return sum((mean.sum() for mean in means), start=0.0)


def labelled(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Spells out entries of scanned stacks, one for each layer. For host values: under a trace it costs an op each."""
    found: dict[str, Any] = {}
    for path, value in entries.items():
        before, star, after = f".{path}.".partition(".*.")
        if not star:
            found[path] = value
            continue
        whole = hasattr(value, "__getitem__") and not isinstance(value, Mapping | tuple)
        for index in range(len(value if whole else jax.tree.leaves(value)[0])):
            item = value[index] if whole else jax.tree.map(lambda x, i=index: x[i], value)
            found.update(labelled({f"{before}.{index}.{after}"[1:-1]: item}))
    return found


def histogram(values: jax.Array, bins: int = 30) -> jax.Array:
    """Counts and upper edges of equal bins: float32 [2, bins]."""
    counts, edges = jnp.histogram(values.astype(jnp.float32), bins=bins)
    return jnp.stack([counts.astype(jnp.float32), edges[1:].astype(jnp.float32)])
