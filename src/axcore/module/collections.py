"""The reports of the layers in one call: summaries, losses and captured outputs."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, Shaped
from numpy.typing import DTypeLike


class Kind(enum.StrEnum):
    """The kind of value that a summary holds."""

    SCALAR = "scalar"
    """An array without dimensions."""
    HISTOGRAM = "histogram"
    """[2, bins]: counts, and the upper edges of the bins. The lowest edge is the first upper edge minus one width."""
    IMAGE = "image"
    """[height, width, channels], from 0 to 1."""


class Reduce(enum.StrEnum):
    """How the values of one summary are reduced over mapped examples, devices, microbatches or blocks of rows."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"

    def over(self, values: Shaped[Array, ...], axis: int = 0) -> Shaped[Array, ...]:
        """Reduces one axis of `values`."""
        if self is Reduce.LAST:
            return jnp.take(values, -1, axis)
        return getattr(jnp, self.value)(values, axis=axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summary:
    """A reported value. In a scanned stack it has a leading axis over the layers."""

    value: Shaped[Array, ...]
    kind: Kind = dataclasses.field(default=Kind.SCALAR, metadata={"static": True})
    reduce: Reduce = dataclasses.field(default=Reduce.MEAN, metadata={"static": True})

    def __float__(self) -> float:
        return float(self.value)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSum:
    """A loss as a total and a count, so that the losses of microbatches can be added before the division.

    Attributes:
        total: The sum of the loss; in a scanned stack, one sum per layer.
        count: The number of terms in the sum.
        weight: The factor of `total / count` in the objective.
    """

    total: Float[Array, "*layer"]
    count: Float[Array, "*layer"]
    weight: float = dataclasses.field(default=1.0, metadata={"static": True})

    def __add__(self, other: LossSum) -> LossSum:
        """The loss over the units of both, which have the same weight."""
        return LossSum(self.total + other.total, self.count + other.count, self.weight)

    def mean(self, count: Float[Array, "*layer"] | None = None) -> Float[Array, "*layer"]:
        """`weight * total / count`, or 0 if the count is 0.

        Args:
            count: Replaces `self.count`. For a microbatch, pass the count of the whole batch.
        """
        count = jax.lax.stop_gradient(self.count if count is None else count)
        return self.weight * self.total / jnp.where(count == 0, 1.0, count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Collections:
    """The reports of the layers in one call, by `path.name`.

    The path of a layer in a scanned stack contains `*`, and its reports have a leading axis over the layers:
    `decoder.layers.*.norm`. `labelled` turns such an entry into one for each layer.

    Attributes:
        summaries: Values for metrics and logs.
        losses: Terms of the objective besides the main loss.
        outputs: Values captured by `invoke(capture=...)`.
    """

    summaries: dict[str, Summary] = dataclasses.field(default_factory=dict)
    losses: dict[str, LossSum] = dataclasses.field(default_factory=dict)
    outputs: dict[str, PyTree] = dataclasses.field(default_factory=dict)

    def reduced(self) -> Collections:
        """Reduces the leading axis over examples, devices or microbatches: summaries by their rule, totals and counts
        of losses by addition."""
        summaries = {
            path: dataclasses.replace(summary, value=summary.reduce.over(summary.value))
            for path, summary in self.summaries.items()
        }
        return Collections(summaries, jax.tree.map(lambda leaf: leaf.sum(axis=0), self.losses), self.outputs)

    @classmethod
    def combined(cls, parts: Sequence[Collections]) -> Collections:
        """Combines the reports of several blocks of one batch: summaries by their rule, each block with the same
        weight, totals and counts of losses by addition, and the output of the last block that has one."""
        summaries: dict[str, list[Summary]] = {}
        losses: dict[str, list[LossSum]] = {}
        for part in parts:
            for path, summary in part.summaries.items():
                summaries.setdefault(path, []).append(summary)
            for path, loss in part.losses.items():
                losses.setdefault(path, []).append(loss)
        return cls(
            {path: _combined(each) for path, each in summaries.items()},
            {path: functools.reduce(operator.add, each) for path, each in losses.items()},
            {path: output for part in parts for path, output in part.outputs.items()},
        )

    def scalars(self) -> dict[str, Shaped[Array, "*layer"]]:
        """The values of scalar summaries, for a step's metrics."""
        return {path: summary.value for path, summary in self.summaries.items() if summary.kind is Kind.SCALAR}

    def weighted_losses(self) -> dict[str, Float[Array, "*layer"]]:
        """`weight * total / count` of each loss, for a step's metrics."""
        return {path: loss.mean() for path, loss in self.losses.items()}

    def total_loss(self, counts: Mapping[str, Float[Array, "*layer"]] | None = None) -> Float[Array, ""] | float:
        """The sum of all weighted losses, including the losses of stacked layers.

        Args:
            counts: For the losses of a microbatch, the count of the whole batch by path.
        """
        means = (loss.mean(None if counts is None else counts[path]) for path, loss in self.losses.items())
        return sum((mean.sum() for mean in means), start=0.0)


def _combined(summaries: Sequence[Summary]) -> Summary:
    """One summary in place of those of several blocks."""
    last = summaries[-1]
    if last.reduce is Reduce.LAST:  # blocks may differ in the shapes of images
        return last
    return dataclasses.replace(last, value=last.reduce.over(jnp.stack([each.value for each in summaries])))


def labelled(entries: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Splits each entry of a scanned stack into one entry per layer, with the index in place of `*`.

    Call it outside of traced code, where each new entry would add an operation.
    """
    found: dict[str, PyTree] = {}
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


def histogram(values: Shaped[Array, ...], bins: int = 30) -> Float[Array, "2 bins"]:
    """Counts and upper edges of bins of equal width."""
    counts, edges = jnp.histogram(values.astype(jnp.float32), bins=bins)
    return jnp.stack([counts.astype(jnp.float32), edges[1:].astype(jnp.float32)])
