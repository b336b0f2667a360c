"""Errors of runs with several processes."""

from __future__ import annotations

from axcore.config import AxcoreError
from axcore.runtime.exit_codes import ExitCode


class PeerFailed(AxcoreError):
    """Another process failed. The message names it and quotes its error."""

    exit_code = ExitCode.PEER_FAILED


class RuntimeTimeout(AxcoreError):
    """Another process did not reach a synchronization point in time. The message names the missing processes."""

    exit_code = ExitCode.TIMED_OUT
