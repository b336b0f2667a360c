"""Pipeline schedules: the order of the tasks of each stage."""

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
        several times (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): stages are idle less often, and send
        more."""

    config: Config

    def __init__(self, cfg: Config):
        self.config = cfg

    def order(self, stages: int, microbatches: int) -> Order:
        """The tasks of each stage, in order: one of each operation for each microbatch and each of its chunks.

        Each stage runs its next task as soon as the inputs have arrived. FORWARD tasks of one chunk must follow the
        order of the microbatches, and so must BACKWARD tasks of the last chunk of the last stage.
        """
        raise NotImplementedError

    def table(self, stages: int, microbatches: int) -> Table:
        """The order as a table of ticks.

        Raises:
            ConfigError: there are fewer microbatches than stages, or the order cannot run or has another number of
                stages.
        """
        if microbatches < stages:
            raise ConfigError(
                f"microbatches={microbatches} are fewer than the {stages} stages of the mesh axis 'pipeline', so some "
                f"stages would always be idle. Set microbatches to at least {stages}, better to a multiple such as "
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
        """The tasks of one operation on a stage: chunk after chunk, for one group of `stages` microbatches after
        another."""
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
    """Forward and backward passes in turn, so that a stage keeps the activations of at most `stages` microbatches
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). The number is larger if `chunks` is larger than 1."""

    def order(self, stages: int, microbatches: int) -> Order:
        forward, backward = (self._visits(op, stages, microbatches) for op in (Op.FORWARD, Op.BACKWARD))

        def of(stage: int) -> Iterator[Task]:
            first = _ahead(stage, stages, self.config.chunks)
            yield from forward[:first]
            for ahead, behind in itertools.zip_longest(forward[first:], backward):
                if ahead is not None:
                    yield ahead
                yield from _with_weights([behind])

        return tuple(tuple(of(stage)) for stage in range(stages))


class ZeroBubble(PipelineSchedule):
    """1F1B in which gradients of weights are computed when a stage would be idle (Qi et al. 2023, arXiv 2401.10241,
    schedule ZB-H1). A stage keeps as many activations as under 1F1B, and what the weight gradients need."""

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
                most = _ahead(stage, stages, chunks) + 1
                live = sum({Op.FORWARD: 1, Op.WEIGHT: -1}.get(task.op, 0) for task in ordered)
                for op, queue in tasks.items():
                    if not queue or (op is Op.FORWARD and live >= max(most, stages)):
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


def _ahead(stage: int, stages: int, chunks: int) -> int:
    """The number of forward passes of a stage before 1F1B alternates."""
    return stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages


def _with_weights(tasks: list[Task]) -> Iterator[Task]:
    """Each task and the computation of its weight gradients."""
    for task in tasks:
        yield task
        yield task._replace(op=Op.WEIGHT)
