"""Errors that end a run."""

from __future__ import annotations

import signal

from axcore.config import AxcoreError
from axcore.runtime import ExitCode


class TrainingError(AxcoreError):
    """The loss or the parameters are not finite, so training cannot continue. The state is not saved."""

    exit_code = ExitCode.NOT_FINITE


class RunStopped(AxcoreError):
    """A signal stopped the run after a step. The state is saved, unless no step was done.

    Attributes:
        signal: the signal, SIGINT or SIGTERM.
        step: number of steps done.
    """

    def __init__(self, message: str, number: signal.Signals, step: int):
        super().__init__(message)
        self.signal, self.step = number, step
        self.exit_code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.PREEMPTED
