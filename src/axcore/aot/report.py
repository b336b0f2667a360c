"""The memory and FLOPs of a compiled training step, as reported by the compiler."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax

from axcore.train import Trainer
from axcore.train.data.form import batch_form

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The compiled training step of one config on the devices of this process.

    Attributes:
        parameters: The number of parameters of the whole model.
        arguments: Bytes of arguments on each device.
        temporaries: Bytes of temporaries on each device.
        outputs: Bytes of outputs on each device, except outputs that reuse donated arguments.
        flops: Floating-point operations of one step on one device. XLA counts each loop body once and does not
            count custom calls.
        compile_seconds: The duration of the compilation.
    """

    parameters: int
    arguments: int
    temporaries: int
    outputs: int
    flops: float
    compile_seconds: float

    @property
    def peak(self) -> int:
        """Bytes on each device while the step runs."""
        return self.arguments + self.temporaries + self.outputs

    def __str__(self) -> str:
        rows = {
            "parameters": f"{self.parameters:,}",
            "peak memory per device": f"{self.peak / GIB:.3f} GiB",
            "  arguments": f"{self.arguments / GIB:.3f} GiB",
            "  temporaries": f"{self.temporaries / GIB:.3f} GiB",
            "  outputs not donated": f"{self.outputs / GIB:.3f} GiB",
            "FLOPs per step and device": f"{self.flops:.3e}",
            "compile time": f"{self.compile_seconds:.1f} s",
        }
        return "\n".join(f"{name:26} {value}" for name, value in rows.items())


def compile_step(cfg: Trainer.Config) -> StepReport:
    """Compiles the step that `Trainer.run` would run, for the devices of this process."""
    program = cfg.build().program()
    batch = batch_form(cfg.input)
    began = time.monotonic()
    compiled = program.lower_train(batch).compile(program.compiler_options)
    seconds = time.monotonic() - began
    memory: Any = compiled.memory_analysis()  # Any: untyped in jax
    cost = compiled.cost_analysis() or {}
    return StepReport(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(program.state.params)),
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        flops=float(cost.get("flops", float("nan"))),
        compile_seconds=seconds,
    )
