"""Rematerialization policies: which intermediate values are kept for the backward pass and which are recomputed."""

from __future__ import annotations

from collections.abc import Callable

import jax

from axcore.config import Config

Policy = Callable[..., bool]
"""The `policy` argument of `jax.checkpoint`."""


class Remat(Config):
    """Base of remat policies. This one keeps only the inputs of each layer."""

    def policy(self) -> Policy:
        """The `policy` argument of `jax.checkpoint`."""
        return jax.checkpoint_policies.nothing_saveable


class SaveMatmuls(Remat):
    """Keeps the results of matrix products without batch dimensions: projections, but not attention scores."""

    def policy(self) -> Policy:
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class SaveNames(Remat):
    """Keeps the values that layers tag with one of these names by `jax.ad_checkpoint.checkpoint_name`."""

    names: tuple[str, ...]

    def policy(self) -> Policy:
        return jax.checkpoint_policies.save_only_these_names(*self.names)
