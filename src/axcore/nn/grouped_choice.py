"""Choosing the implementation of the grouped products of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from axcore.nn.choosing import choose, is_recording
from axcore.nn.grouped_matmul import Blocks, GroupedMatmul, GroupedRequest


class FirstSupported(GroupedMatmul):
    """The first grouped product of `order` that supports every product of a mixture, so that all have one padding.

    `choose_grouped` resolves it. There is no fallback to a grouped product outside `order`.
    """

    order: tuple[GroupedMatmul, ...] = (Blocks(),)

    def align(self, rows: int, groups: int) -> int:
        """That of the first in the order, for estimates. The chosen one pads by its own."""
        return next((each.align(rows, groups) for each in self.order), 1)


def choose_grouped(matmul: GroupedMatmul, requests: Sequence[GroupedRequest], path: str) -> GroupedMatmul:
    """The implementation that a mixture uses: the first of `matmul.order` that supports all requests, or `matmul`.

    While choices are recorded, it computes zeros.

    Args:
        path: path of the slot, for messages.

    Raises:
        ConfigError: none supports all requests. The message has the path, the requests and the reasons.
    """

    def refusal(each: GroupedMatmul, requests: tuple[GroupedRequest, ...]) -> str | None:
        return next((reason for request in requests if (reason := each.supports(request)) is not None), None)

    choice = choose(
        path,
        _order(matmul),
        lambda _: tuple(requests),
        refusal,
        failure="no grouped product supports this mixture",
        remedy="Use Blocks(), or FirstSupported(order=(..., Blocks()))",
    )
    return _Placeholder() if is_recording() else cast(GroupedMatmul, choice.chosen)


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
