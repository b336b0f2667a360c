"""The checkpoint schedule."""

from __future__ import annotations

import time

from axcore.config import PositiveFloat, PositiveInt
from axcore.train.callbacks.base import Callback, CallbackRequest, RunInfo


class Saving(Callback):
    """Requests a checkpoint every few steps, every few minutes, or both. The last step is always saved.

    The trainer's `checkpointer` decides where checkpoints go and which ones are kept.
    """

    class Config(Callback.Config):
        every_steps: PositiveInt | None = None
        every_minutes: PositiveFloat | None = 10.0
        """Minutes between checkpoints, counted from the last one that this callback requested."""

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._since = time.monotonic()

    def start(self, run: RunInfo) -> None:
        self._since = time.monotonic()

    def due(self, step: int) -> CallbackRequest | None:
        steps, minutes = self.config.every_steps, self.config.every_minutes
        if steps and step % steps == 0:
            self._since = time.monotonic()
            return CallbackRequest(save=True, deterministic=True)
        if minutes and time.monotonic() - self._since >= 60 * minutes:
            self._since = time.monotonic()
            return CallbackRequest(save=True)
        return None
