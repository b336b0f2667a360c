"""Choosing the implementation of the grouped products of a mixture of experts."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from axcore.config import ConfigError
from axcore.nn.grouped_matmul import Blocks, GroupedMatmul, GroupedRequest


class FirstSupported(GroupedMatmul):
    """The first grouped product of `order` that supports every product of a mixture, so that all have one padding.

    `choose` resolves it. There is no fallback to a grouped product outside `order`.
    """

    order: tuple[GroupedMatmul, ...] = (Blocks(),)

    def align(self, rows: int, groups: int) -> int:
        """That of the first in the order, for estimates. The chosen one pads by its own."""
        return next((each.align(rows, groups) for each in self.order), 1)


@dataclasses.dataclass(frozen=True)
class GroupedChoice:
    """The grouped product that a mixture uses.

    Attributes:
        path: config path of the slot in the model.
        requests: the products of the mixture on one device.
        matmul: the chosen implementation; None if none supports all requests.
        refused: those tried before it, each with the reason why it does not support one of the requests.
    """

    path: str
    requests: tuple[GroupedRequest, ...]
    matmul: GroupedMatmul | None
    refused: tuple[tuple[GroupedMatmul, str], ...]

    @property
    def described(self) -> str:
        """The requests as text."""
        return " and ".join(dict.fromkeys(map(str, self.requests)))

    def problem(self) -> str:
        """An error message if no grouped product supports the mixture."""
        if self.matmul is not None:
            return ""
        reasons = "; ".join(f"{type(each).__name__}: {reason}" for each, reason in self.refused)
        return (
            f"{self.path}: no grouped product supports this mixture ({self.described}). {reasons or 'order is empty'}. "
            f"Use Blocks(), or FirstSupported(order=(..., Blocks()))"
        )


_choices: contextvars.ContextVar[list[GroupedChoice] | None] = contextvars.ContextVar(
    "axcore_grouped_choices", default=None
)


@contextlib.contextmanager
def recording_grouped() -> Iterator[list[GroupedChoice]]:
    """Records the choice of every mixture traced inside the block.

    Grouped products do not run and are zeros, so use it with `jax.eval_shape` only.
    """
    found: list[GroupedChoice] = []
    token = _choices.set(found)
    try:
        yield found
    finally:
        _choices.reset(token)


def choose(matmul: GroupedMatmul, requests: Sequence[GroupedRequest], path: str) -> GroupedMatmul:
    """The implementation that a mixture uses: the first of `matmul.order` that supports all requests, or `matmul`.

    Args:
        path: path of the slot, for messages.

    Raises:
        ConfigError: none supports all requests. The message has the path, the requests and the reasons.
    """
    refused: list[tuple[GroupedMatmul, str]] = []
    chosen = None
    for each in _order(matmul):
        reason = next((reason for request in requests if (reason := each.supports(request)) is not None), None)
        if reason is None:
            chosen = each
            break
        refused.append((each, reason))
    choice = GroupedChoice(path, tuple(requests), chosen, tuple(refused))
    if (choices := _choices.get()) is not None:
        choices.append(choice)
        return _Placeholder()
    if chosen is None:
        raise ConfigError(choice.problem())
    return chosen


def _order(matmul: GroupedMatmul) -> Iterator[GroupedMatmul]:
    if not isinstance(matmul, FirstSupported):
        yield matmul
        return
    for each in matmul.order:
        yield from _order(each)


class _Placeholder(GroupedMatmul):
    """Zeros in the shape of a product, while only choices are recorded."""

    def __call__(
        self,
        x: Float[Array, "rows input_dim"],
        matrices: Float[Array, "group input_dim output_dim"],
        sizes: Int[Array, " group"],
        group: Int[Array, " blocks"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "rows output_dim"]:
        return jnp.zeros((x.shape[0], matrices.shape[2]), accumulate or x.dtype)

    def outer(
        self,
        x: jax.Array,
        y: jax.Array,
        sizes: Int[Array, " group"],
        group: Int[Array, " blocks"],
        accumulate: DTypeLike | None = None,
    ) -> jax.Array:
        return jnp.zeros((sizes.size, x.shape[1], y.shape[1]), accumulate or x.dtype)
