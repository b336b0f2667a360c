"""The exit codes of the `axcore` command. docs/running.md explains them to users."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """How a command ended. With nothing to save, a signal exits with 128 plus its number, as in a shell."""

    DONE = 0
    FAILED = 1
    """An unexpected error; stderr has the traceback."""
    USAGE = 2
    """The command, the config, the input or a folder is invalid. The message explains what to change."""
    DOES_NOT_FIT = 3
    """`axcore aot` compiled a program that needs more memory than the device has."""
    PREEMPTED = 75
    """SIGTERM stopped the run after a step. The state is saved; resume the run."""
    PEER_FAILED = 80
    """Another process of the run failed. Its own message gives the reason."""
    TIMED_OUT = 81
    """Another process of the run did not start, respond or reach a synchronization point in time."""
    NOT_FINITE = 82
    """The loss or the parameters are not finite."""
    INTERRUPTED = 130
    """Ctrl-C stopped the command. A run in progress saved its state; resume it."""
