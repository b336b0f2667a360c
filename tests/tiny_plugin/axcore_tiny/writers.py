"""Writers that write nothing and disturb a run instead."""

import time

from axcore.train import Writer


def sabotage(folder):
    """What `Saboteur` calls; a test puts its own here."""


class Silent(Writer):
    """Base: keeps nothing."""

    def __init__(self, cfg, folder):
        self.cfg, self.folder = cfg, folder

    def write(self, step, values):
        pass

    def rewind(self, step):
        pass

    def flush(self):
        pass

    def close(self):
        pass


class Pace(Silent):
    """Makes every step last, so that there is time to kill the process in it."""

    class Config(Silent.Config):
        seconds: float = 0.01

    def write(self, step, values):
        time.sleep(self.cfg.seconds)


class Saboteur(Silent):
    """Calls `sabotage` once, when a step is reported."""

    class Config(Silent.Config):
        step: int = 0

    def write(self, step, values):
        if step == self.cfg.step and "train/loss" in values:
            sabotage(self.folder)
