"""SIGINT and SIGTERM take effect at any point of a program."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from axcore.runtime import signals

START = """
import os, signal, time
from axcore.runtime import signals
signals.install()
def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.05)
"""


def run(code):
    """Exit status and stderr of a process."""
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", signals.HANDLED)
def test_without_a_graceful_block_the_process_ends_immediately(number):
    code, err = run(f"try:\n    send({int(number)})\nfinally:\n    print('never')")
    assert code == 128 + number
    assert number.name in err


def test_case_no_signal_is_lost_during_compilation_or_garbage_collection():
    import jax
    import jax.numpy as jnp

    sent = 30
    rng = random.Random(0)
    lasting = 0
    for number in range(sent):
        kind = signal.SIGINT if number % 2 else signal.SIGTERM
        with pytest.raises(StopIteration), signals.graceful():
            timer = threading.Timer(rng.uniform(0, 0.02), os.kill, [os.getpid(), kind])
            timer.start()
            while signals.stop_requested() is None:
                gc.collect(0)
                jax.jit(lambda x, lasting=lasting: x * lasting)(jnp.zeros(1))
                lasting += 1
            timer.join()
            assert signals.stop_requested() is kind
            raise StopIteration  # like a run; an exception marks the signal as handled


def test_a_repeated_signal_is_handled_once_and_does_not_kill():
    code, err = run(
        "with signals.graceful():\n    send(15); send(15)\n    print(signals.stop_requested()); os._exit(7)"
    )
    assert code == 7
    assert err.count("SIGTERM") == 1


def test_a_second_signal_kills_the_process():
    code, err = run(
        "signals.SAME_SIGNAL_SECONDS = 0.01\nwith signals.graceful():\n    send(15); send(2)\n    os._exit(7)"
    )
    assert code == -signal.SIGINT
    assert "SIGINT again" in err


def test_an_unhandled_signal_takes_effect_after_the_block():
    code, _ = run("with signals.graceful():\n    send(15)\nprint('never')\nos._exit(7)")
    assert code == 128 + signal.SIGTERM


def test_graceful_restores_the_handlers_of_the_program():
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("theirs"))
    try:
        with pytest.raises(StopIteration), signals.graceful():
            assert signals.stop_requested() is None
            signal.raise_signal(signal.SIGTERM)
            assert signals.stop_requested() is signal.SIGTERM
            raise StopIteration
        assert signals.stop_requested() is None
        signal.raise_signal(signal.SIGTERM)
        assert received == ["theirs"]
        with signals.graceful():
            signal.raise_signal(signal.SIGTERM)
        assert received == ["theirs"] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_graceful_does_nothing_when_nested_or_in_other_threads():
    found = []

    def other():
        with signals.graceful():
            found.append(signals.stop_requested())

    with pytest.raises(StopIteration), signals.graceful():
        with signals.graceful():
            signal.raise_signal(signal.SIGINT)
        assert signals.stop_requested() is signal.SIGINT
        raise StopIteration
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [None]


def test_case_the_command_handles_signals_before_slow_imports():
    code = "import sys; import axcore.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.split()
    assert "axcore.runtime.signals" in loaded
    assert not {"jax", "numpy", "flax", "argparse", "axcore.config", "axcore.cli"} & set(loaded)
