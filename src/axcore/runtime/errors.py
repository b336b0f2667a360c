"""Why a run of one or several processes ends early. Each error knows its exit code."""

from __future__ import annotations

import signal

from axcore.config import AxcoreError
from axcore.runtime.exit_codes import ExitCode


class RunStopped(AxcoreError):
    """A signal stopped the run; the message says what was saved.

    Attributes:
        exit_code: INTERRUPTED after SIGINT, else PREEMPTED.
    """

    def __init__(self, message: str, by: signal.Signals):
        super().__init__(message)
        self.exit_code = ExitCode.INTERRUPTED if by == signal.SIGINT else ExitCode.PREEMPTED


class PeerFailed(AxcoreError):
    """Another process failed. The message names it and quotes its error."""

    exit_code = ExitCode.PEER_FAILED


class RuntimeTimeout(AxcoreError):
    """Another process did not arrive in time. The message names the missing ones."""

    exit_code = ExitCode.TIMED_OUT
