"""Pipeline schedules: the order in which each stage runs its tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from axcore.config import Config as BaseConfig, ConfigError, Configurable, PositiveInt
from axcore.parallel.pipeline.tables import ModelTask, Op, Order, Table, Task, model_task, needs, table


class PipelineSchedule(Configurable):
    """Base of pipeline schedules. A subclass implements `order`."""

    class Config(BaseConfig):
        chunks: PositiveInt = 1
        """Number of chunks of consecutive layers on each stage. With more than one, a microbatch visits each stage
        several times (interleaving, Narayanan et al. 2021, arXiv 2104.04473, section 2.2): stages are idle less often
        but communicate more."""

    config: Config

    def __init__(self, cfg: Config):
        self.config = cfg

    def order(self, stages: int, microbatches: int) -> Order:
        """The tasks of each stage, in order: one of each operation for each microbatch and each of its chunks.

        Each stage runs its next task as soon as the inputs have arrived. The FORWARD tasks of a chunk must run in the
        order of the microbatches, and so must the BACKWARD tasks of the last chunk of the last stage.
        """
        raise NotImplementedError

    def table(self, stages: int, microbatches: int) -> Table:
        """The order as a table of ticks.

        Raises:
            ConfigError: there are fewer microbatches than stages, or the order is invalid or has another number of
                stages.
        """
        if microbatches < stages:
            raise ConfigError(
                f"microbatches={microbatches} is less than the {stages} stages of the mesh axis 'pipeline', so some "
                f"stages would always be idle. Set microbatches to at least {stages}, or better to a multiple such as "
                f"{4 * stages}"
            )
        order = self.order(stages, microbatches)
        if len(order) != stages:
            raise ConfigError(
                f"mesh.pipeline: {type(self).__name__}.order lists the tasks of {len(order)} stages, but the mesh axis "
                f"'pipeline' has {stages}. Return one tuple of tasks for each stage"
            )
        return table(order, microbatches, self.config.chunks)

    def _visits(self, op: Op, stages: int, microbatches: int) -> list[Task]:
        """The tasks of one operation on a stage: for each group of `stages` microbatches, chunk by chunk."""
        chunks = range(self.config.chunks) if op is Op.FORWARD else reversed(range(self.config.chunks))
        ordered = tuple(chunks)
        groups = (range(start, min(start + stages, microbatches)) for start in range(0, microbatches, stages))
        return [Task(op, number, chunk) for group in groups for chunk in ordered for number in group]


class GPipe(PipelineSchedule):
    """All forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965). Each stage keeps the
    activations of all microbatches."""

    def order(self, stages: int, microbatches: int) -> Order:
        forward, backward = (self._visits(op, stages, microbatches) for op in (Op.FORWARD, Op.BACKWARD))
        return (tuple(itertools.chain(forward, _with_weights(backward))),) * stages


class OneForwardOneBackward(PipelineSchedule):
    """Forward and backward passes in turn, so that a stage keeps the activations of at max_live `stages` microbatches
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). With more than one chunk, it keeps more."""

    def order(self, stages: int, microbatches: int) -> Order:
        forward, backward = (self._visits(op, stages, microbatches) for op in (Op.FORWARD, Op.BACKWARD))

        def tasks_of(stage: int) -> Iterator[Task]:
            warmup = _num_warmup(stage, stages, self.config.chunks)
            yield from forward[:warmup]
            for next_forward, next_backward in itertools.zip_longest(forward[warmup:], backward):
                if next_forward is not None:
                    yield next_forward
                yield from _with_weights([next_backward])

        return tuple(tuple(tasks_of(stage)) for stage in range(stages))


class ZeroBubble(PipelineSchedule):
    """1F1B in which gradients of weights are computed when a stage would be idle (Qi et al. 2023, arXiv 2401.10241,
    schedule ZB-H1). A stage keeps as many activations as with 1F1B, and also what the weight gradients need."""

    def order(self, stages: int, microbatches: int) -> Order:
        chunks, last, done = self.config.chunks, stages * self.config.chunks - 1, set[ModelTask]()
        waiting = [
            {op: self._visits(op, stages, microbatches) for op in (Op.BACKWARD, Op.FORWARD)} | {Op.WEIGHT: []}
            for _ in range(stages)
        ]
        order: tuple[list[Task], ...] = tuple([] for _ in range(stages))
        while any(any(tasks.values()) for tasks in waiting):
            started = []
            for stage, (tasks, ordered) in enumerate(zip(waiting, order, strict=True)):
                max_live = _num_warmup(stage, stages, chunks) + 1
                live = sum({Op.FORWARD: 1, Op.WEIGHT: -1}.get(task.op, 0) for task in ordered)
                for op, queue in tasks.items():
                    if not queue or (op is Op.FORWARD and live >= max(max_live, stages)):
                        continue
                    task = model_task(queue[0], stage, stages)
                    if all(each in done for each in needs(task, last)):
                        ordered.append(queue.pop(0))
                        started.append(task)
                        if op is Op.BACKWARD:
                            tasks[Op.WEIGHT].append(ordered[-1]._replace(op=Op.WEIGHT))
                        break
            done.update(started)
        return tuple(map(tuple, order))


def _num_warmup(stage: int, stages: int, chunks: int) -> int:
    """The number of warmup forward passes of a stage, before 1F1B alternates."""
    return stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages


def _with_weights(tasks: list[Task]) -> Iterator[Task]:
    """Each task, followed by the computation of its weight gradients."""
    for task in tasks:
        yield task
        yield task._replace(op=Op.WEIGHT)
