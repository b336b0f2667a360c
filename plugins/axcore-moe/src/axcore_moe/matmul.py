"""Grouped matrix products with tokamax."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

import axcore as ax
from axcore.nn import GroupedMatmul


class Tokamax(GroupedMatmul):
    """`tokamax.ragged_dot`: kernels for GPUs and TPUs, with tokamax's fallback elsewhere."""

    def __call__(
        self,
        x: jax.Array,
        matrices: jax.Array,
        sizes: jax.Array,
        group: jax.Array,
        accumulate: DTypeLike | None = None,
    ) -> jax.Array:
        try:
            import tokamax  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise ax.ConfigError(f"Tokamax requires the package tokamax (pip install tokamax): {error}") from error
        return tokamax.ragged_dot(x, matrices, sizes, preferred_element_type=accumulate)
