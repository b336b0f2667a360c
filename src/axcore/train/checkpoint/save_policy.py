"""When a checkpoint is due."""

from __future__ import annotations

import math

import jax

from axcore.config import ConfigError
from axcore.runtime.processes import broadcast

STEPS_BEFORE_PACE = 10
"""Steps after which several processes agree on the step of the next timed checkpoint."""


class SavePolicy:
    """Due every so many steps, or every so many minutes, or both. Every process gets the same answers."""

    def __init__(self, every_steps: int | None, every_minutes: float | None):
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes)):
            if value is not None and value <= 0:
                raise ConfigError(f"checkpointer.{name} is {value}; give a positive number, or None for never")
        self.every_steps = every_steps
        self.every_seconds = None if every_minutes is None else 60 * every_minutes
        self._since: tuple[int, float] | None = None
        self._agreed_step: int | None = None

    def due(self, step: int, now: float) -> bool:
        """Whether to save after `step` steps, at `now` seconds of a monotonic clock. Call it after each step.

        The minutes count from the last time that it said yes (at first, from the first call).
        """
        if self._since is None:
            self._since = (step, now)
        due = self.every_steps is not None and step % self.every_steps == 0
        due = due or self._time_is_up(step, now, *self._since)
        if due:
            self._since, self._agreed_step = (step, now), None
        return due

    def _time_is_up(self, step: int, now: float, since_step: int, since: float) -> bool:
        if self.every_seconds is None:
            return False
        if jax.process_count() == 1:
            return now - since >= self.every_seconds
        # Clocks differ, and asking each other at every step would stall the devices. So the first process
        # measures the pace over a few steps and names the step at which the time will be up.
        if self._agreed_step is None:
            if step - since_step < STEPS_BEFORE_PACE:
                return False
            pace = max(now - since, 1e-6) / (step - since_step)
            own = max(step, since_step + math.ceil(self.every_seconds / pace))
            self._agreed_step = int(broadcast("the step of the next checkpoint", str(own).encode()))
        return step >= self._agreed_step
