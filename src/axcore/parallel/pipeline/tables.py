"""Tables of pipeline schedules: the operation of each stage in each tick, and the buffers that it uses.

In a tick every stage runs one operation, then each stage sends an activation to the next stage and a gradient to the
previous one. Chunk v of stage s is chunk `v * stages + s` of the model.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from axcore.config import ConfigError


class Op(enum.IntEnum):
    """An operation of a stage on one microbatch and one chunk."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    """The gradient of the input of the chunk."""
    WEIGHT = 3
    """The gradient of the weights of the chunk."""


class Task(NamedTuple):
    """An operation with the microbatch and the stage's own chunk that it works on."""

    op: Op
    microbatch: int
    chunk: int = 0


Order = tuple[tuple[Task, ...], ...]
"""The tasks of each stage, in order."""


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A schedule as arrays [ticks, stages].

    Each kind of buffer has slots. A value stays in its slot from the tick that produces it to the last tick that reads
    it. One additional slot, the last, receives values that are never read.

    Attributes:
        op, microbatch, chunk: the task of the stage; zeros if it is idle.
        x: the slot of the input of the chunk.
        g: the slot of the gradient of its output; in the last chunk, the slot of the output itself.
        residuals: the slot of the values that FORWARD stores for the backward pass.
        stash: the slot of the values that BACKWARD stores for WEIGHT.
        x_arrives, g_arrives: the slots for the input and the gradient that arrive after the tick.
        chunks: number of chunks of each stage.
        num_x, num_g, num_residuals, num_stash: the largest number of slots that a stage uses.
    """

    op: Int32[np.ndarray, "ticks stages"]
    microbatch: Int32[np.ndarray, "ticks stages"]
    chunk: Int32[np.ndarray, "ticks stages"]
    x: Int32[np.ndarray, "ticks stages"]
    g: Int32[np.ndarray, "ticks stages"]
    residuals: Int32[np.ndarray, "ticks stages"]
    stash: Int32[np.ndarray, "ticks stages"]
    x_arrives: Int32[np.ndarray, "ticks stages"]
    g_arrives: Int32[np.ndarray, "ticks stages"]
    chunks: int
    num_x: int
    num_g: int
    num_residuals: int
    num_stash: int

    @property
    def ticks(self) -> int:
        return len(self.op)

    @property
    def idle(self) -> float:
        """The share of the ticks in which a stage is idle, averaged over the stages."""
        return float((self.op == Op.IDLE).mean())

    @property
    def together(self) -> Mapping[frozenset[Op], int]:
        """The operations that stages run in the same tick -> the number of such ticks."""
        return Counter(frozenset(map(Op, row)) for row in self.op.tolist())


def table(order: Order, microbatches: int, chunks: int) -> Table:
    """The table of an order: each stage runs its next task as soon as the inputs have arrived.

    Raises:
        ConfigError: the order lacks a task, has one twice, runs microbatches out of order, or deadlocks.
    """
    for stage, tasks in enumerate(order):
        _check(stage, tasks, len(order), microbatches, chunks)
    when = _simulated(order, chunks)
    ticks, stages = 1 + max(when.values()), len(order)
    columns: dict[str, Any] = {}  # Any: the arrays, by the name of the field
    for name in Task._fields:
        columns[name] = np.zeros((ticks, stages), np.int32)
    for stage, tasks in enumerate(order):
        for task in tasks:
            tick = when[model_task(task, stage, stages)]
            for name, value in task._asdict().items():
                columns[name][tick, stage] = value
    spans = [_spans(when, stage, stages, microbatches, chunks) for stage in range(stages)]
    slots = {kind: [_allocated(each[kind]) for each in spans] for kind in ("x", "g", "residuals", "stash")}
    counts = {kind: max((1 + max(each.values(), default=-1)) for each in found) for kind, found in slots.items()}
    for kind in slots:
        columns[kind] = np.full((ticks, stages), counts[kind], np.int32)
        for stage in range(stages):
            for span, slot in slots[kind][stage].items():
                columns[kind][[*span.uses], stage] = slot
    for kind in ("x", "g"):
        columns[f"{kind}_arrives"] = np.full((ticks, stages), counts[kind], np.int32)
        for stage in range(stages):
            for span, slot in slots[kind][stage].items():
                if span.start not in span.uses:
                    columns[f"{kind}_arrives"][span.start, stage] = slot
    columns |= {f"num_{kind}": count for kind, count in counts.items()}
    return Table(**columns, chunks=chunks)


class _Span(NamedTuple):
    """A value in a buffer, from the tick that produces it, and the ticks of the tasks that use its slot."""

    start: int
    uses: tuple[int, ...]


ModelTask = tuple[Op, int, int]
"""An operation, a microbatch and a chunk of the model."""


def model_task(task: Task, stage: int, stages: int) -> ModelTask:
    return task.op, task.microbatch, task.chunk * stages + stage


def _check(stage: int, tasks: Sequence[Task], stages: int, microbatches: int, chunks: int) -> None:
    where = f"mesh.pipeline: the order of stage {stage}"
    expected = {Task(op, m, v) for op in list(Op)[1:] for m in range(microbatches) for v in range(chunks)}
    if missing := expected - set(tasks):
        raise ConfigError(f"{where} lacks {_named(min(missing))}")
    if len(tasks) > len(expected):
        extra = next(task for number, task in enumerate(tasks) if task not in expected or task in tasks[:number])
        raise ConfigError(f"{where} has {_named(extra)}, which is not part of the step or appears twice")
    ordered = [(Op.FORWARD, v) for v in range(chunks)]
    if stage == stages - 1:
        ordered.append((Op.BACKWARD, chunks - 1))  # the loss, which may write Variables
    for op, chunk in ordered:
        numbers = [task.microbatch for task in tasks if (task.op, task.chunk) == (op, chunk)]
        if numbers != sorted(numbers):
            raise ConfigError(
                f"{where} runs {op.name} of chunk {chunk} on the microbatches {numbers}. Variables are written in the "
                f"order of the microbatches, so run them in this order"
            )


def _named(task: Task) -> str:
    return f"{Op(task.op).name} of microbatch {task.microbatch} and chunk {task.chunk}"


def _simulated(order: Order, chunks: int) -> dict[ModelTask, int]:
    """The tick of each task."""
    stages = len(order)
    last, done, tick = stages * chunks - 1, dict[ModelTask, int](), 0
    position = [0] * stages
    while any(position[stage] < len(order[stage]) for stage in range(stages)):
        started = []
        for stage in range(stages):
            if position[stage] < len(order[stage]):
                task = model_task(order[stage][position[stage]], stage, stages)
                if all(each in done for each in needs(task, last)):
                    started.append(task)
                    position[stage] += 1
        if not started:
            stage = next(stage for stage in range(stages) if position[stage] < len(order[stage]))
            own = order[stage][position[stage]]
            op, microbatch, chunk = next(
                each for each in needs(model_task(own, stage, stages), last) if each not in done
            )
            raise ConfigError(
                f"mesh.pipeline: the order deadlocks in tick {tick}: stage {stage} waits to run {_named(own)} until "
                f"stage {chunk % stages} has run {_named(Task(op, microbatch, chunk // stages))}"
            )
        done.update(dict.fromkeys(started, tick))
        tick += 1
    return done


def needs(task: ModelTask, last: int) -> Iterable[ModelTask]:
    """The tasks that must end in an earlier tick. `last` is the last chunk of the model."""
    op, microbatch, chunk = task
    if op is Op.FORWARD and chunk > 0:
        yield Op.FORWARD, microbatch, chunk - 1
    if op is Op.BACKWARD:
        yield Op.FORWARD, microbatch, chunk
        if chunk < last:
            yield Op.BACKWARD, microbatch, chunk + 1
    if op is Op.WEIGHT:
        yield Op.BACKWARD, microbatch, chunk


def _spans(
    when: dict[ModelTask, int], stage: int, stages: int, microbatches: int, chunks: int
) -> dict[str, list[_Span]]:
    """The values in the buffers of a stage, by kind of buffer."""
    spans: dict[str, list[_Span]] = {"x": [], "g": [], "residuals": [], "stash": []}
    last = stages * chunks - 1
    for microbatch in range(microbatches):
        for chunk in range(stage, stages * chunks, stages):
            forward, backward, weight = (when[op, microbatch, chunk] for op in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT))
            if chunk > 0:
                spans["x"].append(_Span(when[Op.FORWARD, microbatch, chunk - 1], (forward,)))
            if chunk < last:
                spans["g"].append(_Span(when[Op.BACKWARD, microbatch, chunk + 1], (backward,)))
            else:
                spans["g"].append(_Span(forward, (forward, backward)))
            spans["residuals"].append(_Span(forward, (forward, backward, weight)))
            spans["stash"].append(_Span(backward, (backward, weight)))
    return spans


def _allocated(spans: Iterable[_Span]) -> dict[_Span, int]:
    """Assigns slots so that spans in one slot do not overlap. A value that arrives after a tick may replace a value
    that is read in this tick."""
    free_at: list[int] = []
    slots = {}
    for span in sorted(spans):
        slot = next((slot for slot, tick in enumerate(free_at) if tick <= span.start), len(free_at))
        free_at[slot : slot + 1] = [span.uses[-1]]
        slots[span] = slot
    return slots
