"""Callbacks that slow down or break a run."""

import time

from axcore.train import Callback


def sabotage(folder):
    """Called by `Saboteur`. Tests replace it."""


class Pace(Callback):
    """Slows down every step, so that there is time to kill the process during it."""

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
