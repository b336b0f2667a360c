"""Callbacks that disturb a run."""

import time

from axcore.train import Callback


def sabotage(folder):
    """What `Saboteur` calls; a test replaces it."""


class Pace(Callback):
    """Makes every step last, so that there is time to kill the process in it."""

    class Config(Callback.Config):
        seconds: float = 0.01

    def step(self, info):
        time.sleep(self.config.seconds)


class Saboteur(Callback):
    """Calls `sabotage` once, when a step is reported."""

    class Config(Callback.Config):
        at: int = 0

    def start(self, run):
        self.folder = run.folder

    def step(self, info):
        if info.step == self.config.at:
            sabotage(self.folder)
