"""Learning-rate schedules: functions of the step and of the total number of steps."""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from axcore.config import Config, NonNegativeFloat, NonNegativeInt, Range


class Schedule(Config):
    """Base class of schedules. The total number of steps is an argument, so that a run may determine it while
    training."""

    def settled(self) -> float:
        """The fraction of a run, from its start, in which the rate does not depend on the total number of steps."""
        return 0.0

    def __call__(self, step: Int[Array, ""], total_steps: Int[Array, ""]) -> Float[Array, ""]:
        """The float32 learning rate of a step; the first step is 0."""
        raise NotImplementedError


class WarmupCosine(Schedule):
    """Rises linearly from 0 to `peak`, then falls along half a cosine to `final * peak` (Loshchilov and Hutter 2017,
    arXiv 1608.03983)."""

    peak: NonNegativeFloat = 3e-4
    warmup_steps: NonNegativeInt = 100
    final: NonNegativeFloat = 0.1

    def __call__(self, step: Int[Array, ""], total_steps: Int[Array, ""]) -> Float[Array, ""]:
        warmup = max(self.warmup_steps, 1)
        rising = (step + 1) / warmup
        done = jnp.clip((step - warmup) / jnp.maximum(total_steps - warmup, 1), 0.0, 1.0)
        falling = self.final + (1 - self.final) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return (self.peak * jnp.minimum(rising, falling)).astype(jnp.float32)


class WarmupStableDecay(Schedule):
    """Rises linearly from 0 to `peak`, stays constant, then falls linearly to 0 (Hu et al. 2024, arXiv 2404.06395).

    Suitable for runs with a time limit, whose number of steps is unknown until the decay begins.
    """

    peak: NonNegativeFloat = 3e-4
    warmup_steps: NonNegativeInt = 100
    decay: Annotated[float, Range(at_least=0, at_most=1)] = 0.3
    """The fraction of the steps in which the rate falls."""

    def settled(self) -> float:
        return 1.0 - self.decay

    def __call__(self, step: Int[Array, ""], total_steps: Int[Array, ""]) -> Float[Array, ""]:
        rising = (step + 1) / max(self.warmup_steps, 1)
        falling = (total_steps - step) / jnp.maximum(self.decay * total_steps, 1.0)
        return (self.peak * jnp.clip(jnp.minimum(rising, falling), 0.0, 1.0)).astype(jnp.float32)
