"""Which intermediate values the backward pass keeps; the rest it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from axcore.config import Config


class Remat(Config):
    """Base of remat policies. This one keeps nothing but the inputs of each layer."""

    def policy(self) -> Callable[..., Any]:
        """What `jax.checkpoint` takes as `policy`."""
        return jax.checkpoint_policies.nothing_saveable


class SaveMatmuls(Remat):
    """Keeps the results of matrix products without batch dimensions: projections, but not attention scores."""

    def policy(self) -> Callable[..., Any]:
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class SaveNames(Remat):
    """Keeps the values that layers tagged with `jax.ad_checkpoint.checkpoint_name` under these names."""

    names: tuple[str, ...]

    def policy(self) -> Callable[..., Any]:
        return jax.checkpoint_policies.save_only_these_names(*self.names)
