"""Programs are compiled before they run, several at the same time."""

import functools
import os
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from axcore.infer.execution.compiling import Compiler

SHAPES = (1, 2)


@pytest.fixture
def together(monkeypatch):
    """Programs that wait for each other before they compile."""
    met, compiled = threading.Barrier(len(SHAPES), timeout=120), []
    compile_one = jax.stages.Lowered.compile

    def compile(lowered, *args, **kwargs):
        met.wait()
        compiled.append(lowered)
        return compile_one(lowered, *args, **kwargs)

    monkeypatch.setattr(os, "cpu_count", lambda: len(SHAPES))
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    return compiled


def test_programs_compile_together_and_then_run_without_compiling(together):
    compiler, traced, ran = Compiler(), [], []

    def double(x):
        traced.append(x.shape)
        jax.debug.callback(lambda: ran.append(x.shape))
        return 2 * x

    program = compiler.jit(double)
    arrays = [jnp.ones(size) for size in SHAPES]
    compiler.compile(functools.partial(program, array) for array in arrays)
    jax.effects_barrier()
    assert len(together) == len(traced) == len(SHAPES) and not ran
    assert [program(array).sum() for array in arrays] == [2, 4]
    assert len(traced) == len(SHAPES)


def test_an_error_of_a_trace_leaves_the_functions_usable():
    compiler = Compiler()
    program = compiler.jit(lambda x, y: x + y)
    with pytest.raises(TypeError, match="incompatible shapes"):
        compiler.compile([lambda: program(jnp.ones(2), jnp.ones(3))])
    assert program(1, 2) == 3


@pytest.mark.parametrize("failing", ["check", "compile"])
def test_no_further_program_compiles_after_an_error(failing, monkeypatch):
    compiler, compiled, is_over = Compiler(), [], threading.Event()
    program = compiler.jit(lambda x: x)
    arrays = [jnp.ones(size) for size in range(1, 9)]

    def compile(lowered, *args, **kwargs):
        is_traced.wait(60)
        compiled.append(lowered)
        is_over.set()
        time.sleep(0.05)  # so that the error arrives before the last program
        if failing == "compile":
            raise RuntimeError("no memory")

    def check():
        if failing == "check" and is_over.is_set():
            raise RuntimeError("closed")

    def calls():
        yield from (functools.partial(program, array) for array in arrays)
        is_traced.set()

    is_traced = threading.Event()
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    with pytest.raises(RuntimeError, match="closed" if failing == "check" else "no memory"):
        compiler.compile(calls(), check)
    assert len(compiled) < len(arrays)
    monkeypatch.undo()
    assert program(arrays[0]) == 1
