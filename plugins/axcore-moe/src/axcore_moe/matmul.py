"""Grouped matrix products with tokamax."""

from __future__ import annotations

import importlib.util

import jax
from jax.typing import DTypeLike

from axcore.nn import GroupedMatmul, GroupedRequest


class Tokamax(GroupedMatmul):
    """`tokamax.ragged_dot`: kernels for GPUs and TPUs, with tokamax's fallback elsewhere."""

    def supports(self, request: GroupedRequest) -> str | None:
        try:
            installed = importlib.util.find_spec("tokamax") is not None
        except ValueError:  # an entry without a spec in sys.modules
            installed = False
        return None if installed else "requires the package tokamax (pip install tokamax)"

    def __call__(
        self,
        x: jax.Array,
        matrices: jax.Array,
        sizes: jax.Array,
        group: jax.Array,
        accumulate: DTypeLike | None = None,
    ) -> jax.Array:
        import tokamax  # type: ignore[import-not-found, unused-ignore]

        return tokamax.ragged_dot(x, matrices, sizes, preferred_element_type=accumulate)
