"""A pipeline schedule for tests: simple, and idle most of the time."""

from __future__ import annotations

from axcore.parallel import PipelineSchedule
from axcore.parallel.pipeline import Op, Order, Task


class OneByOne(PipelineSchedule):
    """Each microbatch passes through all stages, forward and backward, before the next one starts."""

    def order(self, stages: int, microbatches: int) -> Order:
        chunks, tasks = range(self.config.chunks), list[Task]()
        for number in range(microbatches):
            tasks += [Task(Op.FORWARD, number, chunk) for chunk in chunks]
            tasks += [Task(op, number, chunk) for chunk in reversed(chunks) for op in (Op.BACKWARD, Op.WEIGHT)]
        return (tuple(tasks),) * stages
