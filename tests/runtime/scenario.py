"""One of several processes, of which one may fail: `python scenario.py NAME VICTIM`."""

import os
import pathlib
import signal
import sys
import threading
import time

from axcore.runtime import signals

signals.install()

from axcore import AxcoreError, runtime  # noqa: E402
from axcore.runtime import failures, processes, watcher  # noqa: E402


def meetings():
    """The communication of processes in a run without failures."""
    index = runtime.index()
    for number in range(3):
        values = [bytes([number, each]) for each in range(2)]
        assert runtime.gather("bytes", values[index]) == values
    runtime.barrier("all")
    for process in range(2):
        try:
            with runtime.together("refused"):
                if index == process:
                    raise AxcoreError("no such folder")
        except AxcoreError as error:
            expected = "no such folder" if index == process else f"process {process} of 2 failed: no such folder"
            assert str(error) == expected, error
    with runtime.together("fine"):
        pass
    try:  # a process reports its own error even if the other process never arrives
        if index == 0:
            with runtime.together("nobody", timeout=1.0):
                raise AxcoreError("the root cause")
    except AxcoreError as error:
        assert str(error) == "the root cause", error
    for _ in range(2):  # an error that the caller handles on every process does not end the next run
        try:
            with runtime.watch(), runtime.watch():
                raise AxcoreError("handled")
        except AxcoreError:
            pass
    began = time.monotonic()
    try:
        runtime.gather("alone", b"", timeout=1.0) if index == 0 else None
    except runtime.RuntimeTimeout as error:
        assert "process 0 of 2 waited 1 s at 'alone' for process 1," in str(error)
        assert time.monotonic() - began < 30
    else:
        assert index == 1
    runtime.barrier("end")


def requests():
    """Each process makes a request at a different time, and both act at the same call."""
    index = runtime.index()
    acted = []
    with runtime.watch():
        for name in ("first", "second"):
            with runtime.Requests() as found:
                if name == "second":
                    threading.Timer(0.3, found.make, ["zero" if index == 0 else "one"]).start()
                wanted = {"zero", "one"} if name == "second" else {"stop"}
                call = 0
                while wanted:
                    if name == "first" and index == 1 and call == 20:
                        found.make("stop")
                    if due := found.due():
                        acted.append([call, sorted(due)])
                        wanted -= due
                    call += 1
                    time.sleep(0.002 if index == 0 else 0.003)
    told = runtime.gather("acted", repr(acted).encode())
    assert told[0] == told[1], told
    assert acted[0][1] == ["stop"] and acted[0][0] >= 20, acted


def stop(victim):
    """Both stop after a signal, and one takes longer to close than the watcher allows after a failure."""
    try:
        with runtime.watch():
            runtime.barrier("stopping")
            try:
                raise Stopped("SIGTERM: the run stops")
            finally:
                if runtime.index() == victim:
                    time.sleep(8)
                    print("closed", flush=True)
    except AxcoreError as error:
        assert error.exit_code == 75
        raise


class Stopped(AxcoreError):
    exit_code = runtime.ExitCode.PREEMPTED


def step():
    """A computation on the devices of both processes."""
    import jax
    from jax.experimental.multihost_utils import process_allgather

    process_allgather(jax.numpy.ones(2))


def train(name, victim):
    """Runs steps until the victim fails."""
    is_victim = runtime.index() == victim
    with runtime.watch():
        with runtime.together("prepare"):
            if is_victim and name == "mkdir":
                pathlib.Path("/proc/no/such").mkdir()
            if is_victim and name == "refused":
                raise AxcoreError("the folder is in use")
        for number in range(1_000_000):
            with watcher.waiting("a step", processes.default_timeout()):
                step()
            if number == 3 and is_victim:
                if name == "hang":  # its heartbeats continue
                    time.sleep(600)
                if name == "loop":
                    raise AxcoreError("the loss is NaN")
                if name == "bug":
                    raise ZeroDivisionError("a bug")
                if name in ("SIGKILL", "SIGSTOP"):
                    os.kill(os.getpid(), signal.Signals[name])
                if name == "busy":  # the other process sleeps and never checks for failures
                    raise AxcoreError("failed while the other was busy")
            if number == 3 and name == "busy":
                time.sleep(600)


def main(name, victim):
    if name == "before start" and int(os.environ["AXCORE_PROCESS_ID"]) == victim:
        raise AxcoreError("no such recipe")
    runtime.start()
    {"meetings": meetings, "requests": requests, "stop": lambda: stop(victim)}.get(name, lambda: train(name, victim))()


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except AxcoreError as error:
        print(f"scenario: {error}", file=sys.stderr)
        failures.record(error)
        runtime.leave(error.exit_code)
    runtime.leave(0)
