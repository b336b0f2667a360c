"""The base class of callbacks, the events that it receives and the requests that it may return."""

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
class CallbackRequest:
    """Actions that a callback requests. They run before the next step, in the order evaluate, save, stop.

    Attributes:
        stop: end the run here. The final evaluation and checkpoint still happen.
        reason: the reason for stopping, shown when the run stops.
        deterministic: every process makes this request at the same step, for instance because it depends only on
            `step` or on metrics. In a run of several processes, any other request counts only on process 0. It
            takes effect a few steps later, at a step that all processes agree on.
    """

    evaluate: bool = False
    save: bool = False
    stop: bool = False
    reason: str = ""
    deterministic: bool = False


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """A run before its first step in this process.

    Attributes:
        cfg: the trainer's config.
        folder: the run folder.
        input: the input of the run.
        program: the training and evaluation steps, with the shapes of the state.
        step: steps done before this process started; 0 for a new run.
        total_steps: the length of the run; None while it is unknown, as in a run limited by `minutes`.
        resumed: whether the run continues an earlier attempt, from a checkpoint or from step 0.
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
        metrics: the scalars that the step reported: `loss`, `gradient_norm`, `learning_rate` and the model's summaries
            by path. `tokens_per_second` is missing in the first step and after an evaluation or a save.
        total_steps: the length of the run, or the current estimate; None while it is unknown.
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
        input: the input of the run.
        summary: the entries of `summary.json` so far.
    """

    cfg: Trainer.Config
    folder: pathlib.Path
    model: Layer
    input: Input
    summary: Mapping[str, Json]


class Callback(config.Configurable):
    """Base class of callbacks, for the mapping `callbacks` of a trainer.

    Every method does nothing by default. Callbacks run on every process, sorted by `order` and then by name.
    If one raises, the others still run; see `on_error`.

    A callback that keeps arrays in device memory, such as an average of the parameters, defines `device_init` and
    `device_update`. Both are pure functions; the second is compiled into the training step. A tree with the structure
    of the parameters is sharded like them. All arrays are saved in each checkpoint.

    ```python
    class StopAtLoss(Callback):
        class Config(Callback.Config):
            loss: float

        def step(self, info):
            if info.metrics["loss"] < self.config.loss:
                return CallbackRequest(stop=True, reason="the loss is low enough", deterministic=True)
    ```
    """

    class Config(config.Config):
        on_error: Literal["stop", "disable"] = "stop"
        """The reaction to an exception. `"stop"` saves the state and ends the run with the error; `"disable"`
        continues without this callback. With several processes, an exception in `evaluate` ends the run at once, since
        other processes may wait for this one."""
        order: config.AnyInt = 0
        """Callbacks with lower numbers run first."""

    first_process_only: ClassVar[bool] = False
    """True for callbacks that only write files or print. Only process 0 builds them."""

    def __init__(self, cfg: Config):
        """Must not touch files, since validating a config builds its callbacks."""
        self.config = cfg

    def start(self, run: RunInfo) -> CallbackRequest | None:
        """Called before the first step. In a resumed run, `set_state` has already been called."""

    def due(self, step: int) -> CallbackRequest | None:
        """Called after each step is dispatched, before its metrics are available. Must be fast."""

    def step(self, info: StepInfo) -> CallbackRequest | None:
        """Receives the metrics of a step. The next step may already be dispatched, to keep the device busy."""

    def evaluate(self, model: Snapshot) -> Mapping[str, float]:
        """Computes metrics of the model during an evaluation."""
        return {}

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> CallbackRequest | None:
        """Receives the metrics that all callbacks computed in an evaluation."""

    def checkpoint(self, step: int) -> None:
        """Called before a checkpoint is written. Output for steps up to this one must reach the disk now."""

    def failure(self, error: BaseException) -> None:
        """Called when the run ends with an error."""

    def end(self, run: FinishedRun) -> Mapping[str, Json]:
        """Called when the run is complete. Returns entries for `summary.json`."""
        return {}

    def close(self) -> None:
        """Releases files and threads. Always the last call, also after a failure."""

    def state(self) -> Mapping[str, Json]:
        """Returns the state that a resumed run needs. Each checkpoint stores the state of process 0."""
        return {}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Restores the state that `state` returned."""

    def device_init(self, params: Tree) -> Tree:
        """Returns the arrays to keep on the devices, given the initial parameters."""
        return {}

    def device_update(self, state: Tree, params: Tree, step: jax.Array) -> Tree:
        """Returns the arrays after a step.

        Args:
            state: the return value of `device_init` or of the last `device_update`.
            params: the parameters after the step.
            step: int32 scalar, the number of the step, from 1.
        """
        return state
