"""What a callback is: the events of a run, and what a callback may ask for."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import jax

from axcore import config
from axcore.module import Layer, Tree
from axcore.train.data import Input
from axcore.train.files import Json
from axcore.train.step.program import Program

if TYPE_CHECKING:
    from axcore.train.callbacks.snapshot import Snapshot
    from axcore.train.run.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Request:
    """What a callback asks of the run, to be done before the next step: evaluate first, then save, then stop.

    Attributes:
        stop: end the run as if its last step were done: it is evaluated and saved.
        reason: shown when the run stops.
        deterministic: every process asks for the same at the same step, for instance because only `step` or metrics
            decide. Otherwise, in a run of several processes, only the request of process 0 counts, and it is granted
            a few steps later, at a step that all processes agree on.
    """

    evaluate: bool = False
    save: bool = False
    stop: bool = False
    reason: str = ""
    deterministic: bool = False


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """A run that is about to take its first step.

    Attributes:
        cfg: the trainer's config.
        folder: the run folder.
        step: steps done before this process started; 0 for a new run.
        total_steps: the length of the run; None while it is unknown (`minutes`).
        resumed: whether the run continues an earlier one, from a checkpoint or from step 0.
    """

    cfg: Trainer.Config
    folder: pathlib.Path
    input: Input
    program: Program
    step: int
    total_steps: int | None
    resumed: bool


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """A finished step.

    Attributes:
        step: its number, from 1.
        metrics: the scalars that the step reported: `loss`, `gradient_norm`, `learning_rate`, summaries by path.
            `tokens_per_second` is missing after a pause.
        total_steps: the length of the run, or the present estimate; None while it is unknown.
    """

    step: int
    metrics: Mapping[str, float]
    total_steps: int | None


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run after its last step, evaluation and checkpoint.

    Attributes:
        cfg: the trainer's config.
        folder: the run folder, for files that a callback writes.
        model: the trained module with its arrays.
        input: the input that the run was trained on.
        summary: the entries of `summary.json` so far.
    """

    cfg: Trainer.Config
    folder: pathlib.Path
    model: Layer
    input: Input
    summary: Mapping[str, Json]


class Callback(config.Configurable):
    """Base of callbacks, for the mapping `callbacks` of a trainer.

    Every method does nothing by default. Callbacks run in the order of `order`, then of their names, on every process.
    An exception in one does not keep the others from running: see `on_error`.

    A callback that keeps something in device memory, such as an average of the parameters, defines `device_init` and
    `device_update`. They are pure functions, compiled into the training step. Their arrays are sharded like the
    parameters and are part of each checkpoint.

    ```python
    class StopAtLoss(Callback):
        class Config(Callback.Config):
            loss: float

        def step(self, info):
            if info.metrics["loss"] < self.config.loss:
                return Request(stop=True, reason="the loss is low enough", deterministic=True)
    ```
    """

    class Config(config.Config):
        on_error: Literal["stop", "disable"] = "stop"
        """After an exception: save the state and end the run with the error, or go on without this callback. With
        several processes, an exception in `evaluate` ends the run at once, since the others may wait for this one."""
        order: int = 0
        """Callbacks with lower numbers run first."""

    first_process_only: ClassVar[bool] = False
    """True for callbacks that only write files or print: other processes do not build them."""

    def __init__(self, cfg: Config):
        """Must not touch files: a config is built to be checked, too."""
        self.config = cfg

    def start(self, run: RunInfo) -> Request | None:
        """The first step comes next. In a resumed run, `set_state` was called before."""

    def due(self, step: int) -> Request | None:
        """Called after each step is dispatched, before its metrics are known. Must be quick."""

    def step(self, info: StepInfo) -> Request | None:
        """The metrics of a step. By then the next step may have been dispatched, so that the device is never idle."""

    def evaluate(self, model: Snapshot) -> Mapping[str, float]:
        """Computes metrics of the model when the run is evaluated."""
        return {}

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> Request | None:
        """The metrics that all callbacks computed in an evaluation."""

    def checkpoint(self, step: int) -> None:
        """A checkpoint is about to be written. Output for steps up to this one must reach the disk now."""

    def failure(self, error: BaseException) -> None:
        """The run ends with an error."""

    def end(self, run: FinishedRun) -> Mapping[str, Json]:
        """The run is complete. Returns entries for `summary.json`."""
        return {}

    def close(self) -> None:
        """The last call in every case, also after a failure. Releases files and threads."""

    def state(self) -> Mapping[str, Json]:
        """What a resumed run needs to continue this callback. Taken for each checkpoint, from process 0."""
        return {}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Continues from what `state` returned."""

    def device_init(self, params: Tree) -> Tree:
        """Arrays to keep on the devices, made from the initial parameters."""
        return {}

    def device_update(self, state: Tree, params: Tree, step: jax.Array) -> Tree:
        """The arrays after a step.

        Args:
            state: what `device_init` or the last `device_update` returned.
            params: the parameters after the step.
            step: int32 scalar, the number of the step from 1.
        """
        return state
