"""Jitted functions that can be compiled before they run, several at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.stages import Lowered

from axcore.parallel import CompilerOptions

OPTIONS: CompilerOptions = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""Options of the XLA compiler. Kernels of a CUDA graph that do not depend on each other run at the same time, such as
those that write keys and values. Compilers of other devices ignore this."""


class Compiler:
    """Makes jitted functions, and compiles them for the arguments of later calls."""

    def __init__(self) -> None:
        self._is_tracing = False

    def jit(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:  # Any: as in `jax.jit`
        """`jax.jit` with `OPTIONS`, except that calls only trace the function while `compile` runs."""
        jitted = jax.jit(fn, compiler_options=dict(OPTIONS), **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_tracing:
                raise _TracedError(jitted.lower(*args, **kwargs))
            return jitted(*args, **kwargs)

        return call

    def compile(self, calls: Iterable[Callable[[], object]], check: Callable[[], None] = lambda: None) -> None:
        """Compiles programs, or reads them from the folder of compiled programs, so that the same calls compile nothing
        later.

        Programs are traced one at a time, since tracing holds Python's interpreter lock, while earlier ones compile.
        Programs that compile at the same time share the device: XLA locks it while it measures kernels.

        Args:
            calls: each calls one jitted function, and returns or changes nothing before. The functions are traced, but
                do not run.
            check: is called before each program is traced, and again after each is compiled. If it raises, or a program
                fails, no further program is compiled.
        """
        self._is_tracing, pool, started = True, ThreadPoolExecutor(os.cpu_count()), []
        try:
            for call in calls:
                check()
                started.append(pool.submit(_traced(call).compile))
            for compiling in started:
                compiling.result()
                check()
        finally:
            self._is_tracing = False
            pool.shutdown(cancel_futures=True)


class _TracedError(Exception):
    """Ends a call of a function that was traced instead of run."""

    def __init__(self, program: Lowered):
        self.program = program


def _traced(call: Callable[[], object]) -> Lowered:
    try:
        call()
    except _TracedError as ended:
        return ended.program
    raise AssertionError("the call ran no program")
