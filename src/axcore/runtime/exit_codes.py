"""The exit codes of the `axcore` command. docs/running.md explains them to users."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """How a command ended. A signal before anything could be saved gives 128 plus its number, as in a shell."""

    DONE = 0
    FAILED = 1
    """An unexpected error; stderr has the traceback."""
    USAGE = 2
    """The command, the config, the input or a folder cannot be used. The message says what to change."""
    PREEMPTED = 75
    """SIGTERM: stopped after a step, with the state saved. Resume the run."""
    PEER_FAILED = 80
    """Another process of the run failed; its own message says why."""
    TIMED_OUT = 81
    """Another process of the run did not arrive in time."""
    NOT_FINITE = 82
    """The loss or the parameters are not finite any more."""
    INTERRUPTED = 130
    """Ctrl-C: stopped. A run in progress saved its state; resume it."""
