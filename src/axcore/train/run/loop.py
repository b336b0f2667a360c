"""The loop over steps: dispatches a step, and only then looks at what the step before it reported."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from axcore.config import AxcoreError
from axcore.module import labelled
from axcore.train.callbacks.progress import Progress
from axcore.train.callbacks.writers import Writer
from axcore.train.step.program import TrainState

Step = Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, dict[str, jax.Array]]]


class TrainingError(AxcoreError):
    """Training cannot go on."""


@dataclasses.dataclass
class Loop:
    """Runs steps and reports each.

    The metrics of a step are fetched after the next step was dispatched, so the device is never idle while Python
    writes them. `flush` fetches what is outstanding.

    Attributes:
        done: steps done.
        host_seconds: for each step, the time that Python spent outside the step call and not waiting for the device.
    """

    step: Step
    state: TrainState
    batches: Iterator[Mapping[str, Any]]
    tokens_per_batch: int
    writers: Sequence[Writer]
    progress: Progress
    done: int
    host_seconds: list[float] = dataclasses.field(default_factory=list)
    _pending: tuple[int, dict[str, jax.Array]] | None = None
    _reported: tuple[int, float] | None = None
    _waited: float = 0.0
    _left: float | None = None

    def advance(self) -> None:
        """One step."""
        batch = next(self.batches)
        now = time.perf_counter()
        if self._left is not None:
            self.host_seconds.append(now - self._left - self._waited)
        self.state, metrics = self.step(self.state, batch)
        self._left, self._waited = time.perf_counter(), 0.0
        self.flush()
        self.done += 1
        self._pending = (self.done, metrics)

    def flush(self) -> None:
        """Reports the newest step, if it was not reported yet.

        Raises:
            TrainingError: its loss is not finite.
        """
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        began = time.perf_counter()
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        self._waited += now - began
        values = _values(metrics)
        if self._reported is not None and step > self._reported[0]:
            values["tokens_per_second"] = self.tokens_per_batch * (step - self._reported[0]) / (now - self._reported[1])
        self._reported = (step, now)
        for writer in self.writers:
            writer.write(step, {f"train/{name}": value for name, value in values.items()})
        self.progress.update(step, values["loss"], values.get("tokens_per_second"))
        if not math.isfinite(values["loss"]):
            raise TrainingError(
                f"the loss of step {step} is {values['loss']}; earlier checkpoints are kept. A lower "
                f"learner.schedule.peak or a longer warmup is the usual cure"
            )

    def pause(self) -> None:
        """Call after time was spent on something else than steps, so that it does not count as theirs."""
        self._left = self._reported = None


def _values(metrics: Mapping[str, jax.Array]) -> dict[str, float]:
    """Scalars of a step that is done, one for each layer where a stack reported."""
    # np.asarray of a ready array is several times cheaper than jax.device_get of the dict.
    return {name: float(value) for name, value in labelled({k: np.asarray(v) for k, v in metrics.items()}).items()}
