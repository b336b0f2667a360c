"""Connects this process to the other processes of the run."""

from __future__ import annotations

import os
import socket
import sys
import threading

from axcore.config import AxcoreError
from axcore.runtime import cluster, signals
from axcore.runtime.errors import RuntimeTimeout
from axcore.runtime.exit_codes import ExitCode
from axcore.runtime.failures import record
from axcore.runtime.processes import default_timeout

HEARTBEAT_SECONDS = 30.0
"""jax considers a process failed after this time without a heartbeat and ends the others."""
START_SECONDS = 120.0


def start() -> None:
    """Initializes `jax.distributed` from the environment (see `cluster.detect`). Does nothing with one process.

    Call it before anything that uses a jax device. It waits for all processes. After a timeout it prints an error and
    exits with `ExitCode.TIMED_OUT`; jax would abort the process instead.

    Raises:
        AxcoreError: the environment is incomplete or inconsistent.
    """
    seconds = default_timeout()
    here = cluster.detect(os.environ)
    if here is None:
        return
    import jax

    if jax.distributed.is_initialized():
        return
    others = f"{here.count - 1} other{'s' if here.count > 2 else ''}"
    place = f"process {here.index} of {here.count} ({here.kind})"
    print(f"{place}: waiting for {others}", file=sys.stderr, flush=True)
    if here.port is not None:
        os.environ.setdefault("JAX_COORDINATOR_PORT", str(here.port))
    jax.config.update("jax_enable_preemption_service", False)  # it would replace the SIGTERM handler
    start_seconds = min(seconds, START_SECONDS)
    timer = threading.Timer(start_seconds, _give_up, [f"{place} waited {start_seconds:g} s for {others}"])
    timer.daemon = True
    timer.start()
    if here.index == 0 and here.coordinator is not None:
        _check_port(here.coordinator, place)
    explicit = here.kind == "axcore"
    try:
        with signals.default():  # Python handlers do not run during the wait in C
            jax.distributed.initialize(
                here.coordinator,
                here.count,
                here.index,
                cluster_detection_method="deactivate" if explicit else None,
                initialization_timeout=int(start_seconds) + 60,
                heartbeat_timeout_seconds=max(1, int(min(seconds, HEARTBEAT_SECONDS))),
                shutdown_timeout_seconds=max(1, int(start_seconds)),
            )
    except (RuntimeError, ValueError) as error:  # jax's detection failed
        raise AxcoreError(f"{place} cannot join the others: {error}") from error
    finally:
        timer.cancel()


def _check_port(coordinator: str, place: str) -> None:
    """Raises if the port is in use. jaxlib may crash instead."""
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    except OSError as error:
        raise AxcoreError(f"{place} cannot listen on {coordinator}: {error.strerror}. Choose another port.") from error


def _give_up(waited: str) -> None:
    error = RuntimeTimeout(
        f"{waited}, but not all of them started. Start every process with the same command, or set "
        f"{cluster.PROCESSES}=1 to run alone."
    )
    print(f"axcore: {error}", file=sys.stderr, flush=True)
    record(error)
    os._exit(ExitCode.TIMED_OUT)
