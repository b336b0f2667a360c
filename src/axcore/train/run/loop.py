"""Dispatches steps and reports the metrics of each step one step later."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from axcore.module import labelled
from axcore.runtime.processes import default_timeout
from axcore.runtime.watcher import waiting
from axcore.train.callbacks.snapshot import Batch
from axcore.train.errors import TrainingError
from axcore.train.step.program import TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
Report = Callable[[int, Mapping[str, float]], None]


@dataclasses.dataclass
class Loop:
    """Runs training steps.

    The metrics of a step are fetched after the next step is dispatched, so the device is not idle while Python
    reports them. `flush` fetches the outstanding metrics.

    Attributes:
        done: the number of steps dispatched.
        report: called with the number of each finished step and its metrics.
        host_seconds: for each step, seconds that Python spent outside of the step call, without waits for the device.
        timeout: seconds that a process waits for a step in which other processes take part.
        measured: number of steps and seconds of the measured speed.
    """

    step: Step
    state: TrainState
    batches: Iterator[Batch]
    tokens_per_step: int
    report: Report
    done: int
    host_seconds: list[float] = dataclasses.field(default_factory=list)
    measured: tuple[int, float] = (0, 0.0)
    timeout: float = dataclasses.field(default_factory=default_timeout)
    _pending: tuple[int, dict[str, jax.Array]] | None = None
    _reported: tuple[int, float] | None = None
    _waited: float = 0.0
    _left: float | None = None

    def advance(self) -> None:
        """Dispatches one step and reports the previous one."""
        batch = next(self.batches)
        now = time.perf_counter()
        if self._left is not None:
            self.host_seconds.append(now - self._left - self._waited)
        with waiting(f"step {self.done + 1}", self.timeout):
            self.state, metrics = self.step(self.state, batch)
        self._left, self._waited = time.perf_counter(), 0.0
        self.flush()
        self.done += 1
        self._pending = (self.done, metrics)

    def flush(self) -> None:
        """Waits for the last step and reports it.

        Raises:
            TrainingError: its loss is not finite.
        """
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        began = time.perf_counter()
        with waiting(f"step {step}", self.timeout):
            jax.block_until_ready(metrics)
        now = time.perf_counter()
        self._waited += now - began
        values = _values(metrics)
        if self._reported is not None and step > self._reported[0]:
            steps, seconds = step - self._reported[0], now - self._reported[1]
            values["tokens_per_second"] = self.tokens_per_step * steps / seconds
            self.measured = (self.measured[0] + steps, self.measured[1] + seconds)
        self._reported = (step, now)
        self.report(step, values)
        if not math.isfinite(values["loss"]):
            raise TrainingError(
                f"the loss of step {step} is {values['loss']}. Earlier checkpoints are unchanged. Try a lower "
                f"learner.schedule.peak or a longer warmup. JAX_DEBUG_NANS=1 names the layer in which a NaN arises."
            )

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of the steps of this process, without compilation, evaluations and saves. None with one step."""
        steps, seconds = self.measured
        return self.tokens_per_step * steps / seconds if steps else None

    def pause(self) -> None:
        """Excludes the time since the last step from the measured speed. Call it after an evaluation or a save."""
        self._left = self._reported = None


def _values(metrics: Mapping[str, jax.Array]) -> dict[str, float]:
    """The scalars of a finished step. A value reported by a stack becomes one scalar per layer."""
    # np.asarray of a ready array is several times cheaper than jax.device_get of the dict.
    return {name: float(value) for name, value in labelled({k: np.asarray(v) for k, v in metrics.items()}).items()}
