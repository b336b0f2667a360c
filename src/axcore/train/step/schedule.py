"""Learning rates as a function of the step and of how many steps there will be."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore.config import Config


class Schedule(Config):
    """Base of schedules. The number of steps is an argument, so a run may learn it while it goes on."""

    def settled(self) -> float:
        """The share of a run, from its start, in which the rate does not depend on the number of steps."""
        return 0.0

    def __call__(self, step: jax.Array, total_steps: jax.Array) -> jax.Array:
        """The learning rate of step `step` (from 0) of `total_steps`: float32 scalar."""
        raise NotImplementedError


class WarmupCosine(Schedule):
    """Linear from 0 to `peak`, then half a cosine down to `final * peak` (Loshchilov and Hutter 2017, 1608.03983)."""

    peak: float = 3e-4
    warmup_steps: int = 100
    final: float = 0.1

    def __call__(self, step: jax.Array, total_steps: jax.Array) -> jax.Array:
        warmup = max(self.warmup_steps, 1)
        rising = (step + 1) / warmup
        done = jnp.clip((step - warmup) / jnp.maximum(total_steps - warmup, 1), 0.0, 1.0)
        falling = self.final + (1 - self.final) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return (self.peak * jnp.minimum(rising, falling)).astype(jnp.float32)


class WarmupStableDecay(Schedule):
    """Linear from 0 to `peak`, steady, then linear to 0 over the last part (Hu et al. 2024, arXiv 2404.06395).

    A run that is given minutes rather than steps need not know its length before the decay begins.
    """

    peak: float = 3e-4
    warmup_steps: int = 100
    decay: float = 0.3
    """The share of the steps over which the rate falls."""

    def settled(self) -> float:
        return 1.0 - self.decay

    def __call__(self, step: jax.Array, total_steps: jax.Array) -> jax.Array:
        rising = (step + 1) / max(self.warmup_steps, 1)
        falling = (total_steps - step) / jnp.maximum(self.decay * total_steps, 1.0)
        return (self.peak * jnp.clip(jnp.minimum(rising, falling), 0.0, 1.0)).astype(jnp.float32)
