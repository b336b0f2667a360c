"""The trainer, which turns a config into a run folder."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np

from axcore import config, runtime
from axcore.config import (
    REQUIRED,
    AxcoreError,
    ConfigError,
    Diff,
    FrozenDict,
    PositiveInt,
    Range,
    Seed,
    parse_text,
    under,
)
from axcore.numerics import require_calibrated
from axcore.parallel import CompilerOptions, Mesh
from axcore.runtime import signals
from axcore.train import files
from axcore.train.callbacks.base import Callback
from axcore.train.callbacks.evaluation import Evaluation
from axcore.train.callbacks.group import Callbacks
from axcore.train.callbacks.progress import Progress
from axcore.train.callbacks.saving import Saving
from axcore.train.callbacks.tensorboard import TensorBoardWriter
from axcore.train.callbacks.writers import JsonlWriter
from axcore.train.checkpoint import model_folder
from axcore.train.checkpoint.initial import Initial, begin
from axcore.train.checkpoint.manager import Checkpointer
from axcore.train.data import Input
from axcore.train.data.form import batch_form
from axcore.train.files import Json
from axcore.train.run import folder as run_folder, identity
from axcore.train.run.agreement import agree
from axcore.train.run.budget import PLAN_FILE
from axcore.train.run.session import Prepared, Session
from axcore.train.step.data_shards import data_shard
from axcore.train.step.learner import Learner
from axcore.train.step.objective import CrossEntropy, Objective
from axcore.train.step.program import UNKNOWN_STEPS, Program, TrainState, program

CONFIG_FILE = "config.txt"
MAX_MINUTES = 10_000_000


class Trainer(config.Configurable):
    """Trains `model` on `input` with `learner` for a number of steps or minutes."""

    class Config(config.Config):
        model: config.Config = REQUIRED
        input: Input.Config = REQUIRED
        objective: Objective.Config = CrossEntropy.Config()
        learner: Learner.Config = Learner.Config()
        microbatches: PositiveInt = 1
        """Number of parts of each batch that are computed in sequence to save activation memory. The gradients are
        those of the whole batch."""
        mesh: Mesh = Mesh()
        compiler_options: CompilerOptions = FrozenDict()
        """Options of the XLA compiler for the training and evaluation steps, as in
        `{"xla_gpu_enable_triton_gemm": False}`; see `axcore.parallel.check_options`."""
        steps: Annotated[int, Range(at_least=1, below=UNKNOWN_STEPS)] | None = None
        minutes: Annotated[float, Range(above=0, below=MAX_MINUTES)] | None = None
        """Wall-clock time for training, compilation included. Set this or `steps`."""
        initial: Initial.Config | None = None
        """Source of the initial weights. None uses the model's initializers."""
        seed: Seed = 0
        checkpointer: Checkpointer.Config = Checkpointer.Config()
        callbacks: Mapping[str, Callback.Config] = FrozenDict(
            evaluation=Evaluation.Config(),
            metrics=JsonlWriter.Config(),
            progress=Progress.Config(),
            saving=Saving.Config(),
            tensorboard=TensorBoardWriter.Config(),
        )

        layout_fields = ("microbatches", "mesh", "compiler_options", "steps", "minutes", "checkpointer", "callbacks")

    def __init__(self, cfg: Config):
        if (cfg.steps is None) == (cfg.minutes is None):
            given = "are both set" if cfg.steps is not None else "leave the length of the run open"
            raise ConfigError(
                f"steps={cfg.steps} and minutes={cfg.minutes} {given}. Set one of them, and the other to None. On the "
                f"command line, --steps N or --minutes N does both."
            )
        self.config = cfg

    def program(self, callbacks: Callbacks | None = None, devices: Sequence[jax.Device] | None = None) -> Program:
        """Builds the training and evaluation steps with abstract shapes. Computes no arrays.

        Args:
            devices: the devices of the mesh, which may be devices to compile for only; by default all devices.
        """
        cfg = self.config
        held = (callbacks or Callbacks(cfg.callbacks)).on_device()
        return program(
            cfg.model, cfg.learner, cfg.mesh.make(devices), cfg.objective, cfg.microbatches, held, cfg.compiler_options
        )

    def run(self, out: str | Path, *, resume: bool = False) -> dict[str, Json]:
        """Trains and returns the summary, which is also written to `summary.json`.

        In a run of several processes (see `axcore.runtime`), every process calls it with the same shared folder.

        Args:
            out: the run folder. Without `resume`, an earlier run in it is moved aside.
            resume: continue from the newest checkpoint. On the same machine the losses equal those of an uninterrupted
                run bit for bit. On another mesh or number of processes they agree within float tolerance.

        Raises:
            AxcoreError: the config, the input or the folder is invalid or differs between processes, and nothing was
                trained; or a callback failed, and the state is saved.
            TrainingError: the loss or the parameters are not finite.
            RunStopped: SIGINT or SIGTERM ended the run; the state is saved.
        """
        folder = files.expanded(out, "out").absolute()
        with signals.graceful(), runtime.watch(), contextlib.ExitStack() as stack:
            agree(self.config)
            with runtime.together("prepare"):
                prepared = self._prepare(folder, resume)
            # Outside of `together`: all processes take part in reading weights, and wait for each other.
            first = self._first_state(folder, resume, prepared.program)
            with runtime.together("folder"):
                if jax.process_index() == 0:
                    self._take_over(folder, resume, stack)
            return Session(self.config, prepared, folder, first).run(resume)

    def _prepare(self, folder: Path, resume: bool) -> Prepared:
        """Builds and validates everything. Writes nothing."""
        cfg = self.config
        if cfg.minutes is not None and jax.process_count() > 1:
            raise ConfigError(
                f"minutes={cfg.minutes} requires a run of one process, since each process measures its own time, but "
                f"this run has {jax.process_count()}. Set steps instead."
            )
        held = _holds_run(folder)
        changed = self._check_same_run(folder, held) if resume else Diff()
        source = self._input()
        callbacks = Callbacks(cfg.callbacks)
        prepared = self.program(callbacks)
        batch = batch_form(cfg.input)
        prepared.batch_shapes(batch)
        for change in changed:
            if change.path == "microbatches" and (layer := prepared.random_layer(batch)) is not None:
                raise ConfigError(
                    f"cannot resume the run in {folder} with microbatches={change.new}: {layer} draws random numbers, "
                    f"which depend on the microbatches. Set microbatches={change.old}, or start a new run from the "
                    f"weights: --use run-weights:folder={folder}"
                )
        cfg.checkpointer.build(folder / model_folder.CHECKPOINTS)
        config.from_json(config.to_json(cfg))  # raises before an earlier run is moved
        traced = None if jax.config.jax_disable_jit else prepared.trace_train(batch)  # so may a layer
        return Prepared(prepared, traced, callbacks, source)

    def _first_state(self, folder: Path, resume: bool, program: Program) -> TrainState | None:
        """The first state of a run that starts from given weights."""
        cfg = self.config
        checkpointer: Checkpointer = cfg.checkpointer.build(folder / model_folder.CHECKPOINTS)
        if resume and checkpointer.latest() is not None:
            return None
        seed = np.array(cfg.seed, np.uint32)
        first = None if cfg.initial is None else begin(cfg.initial, cfg.model, program, seed)
        state = first or program.state
        require_calibrated(program.fn.bind(state.params, state.model_state), "model")
        return first

    def _take_over(self, folder: Path, resume: bool, stack: contextlib.ExitStack) -> None:
        """Moves an earlier run out of the way, then locks the folder and writes the config."""
        if not resume and _holds_run(folder):
            with run_folder.Lock(folder):
                aside = run_folder.move_aside(folder)
                print(f"moved the earlier run in {folder} to {aside}", file=sys.stderr)
        run_folder.create(folder)
        stack.enter_context(run_folder.Lock(folder))
        file = folder / CONFIG_FILE
        if resume:
            _, allowed = identity.changes(parse_text(file.read_text()), self.config)
            if any(change.path == "minutes" for change in allowed):
                (folder / PLAN_FILE).unlink(missing_ok=True)
        files.write_text(file, self.config.text())
        model_folder.write_config(folder, self.config)

    def _input(self) -> Input:
        cfg = self.config.input
        if cfg.seed is None:
            cfg = cfg.set(seed=self.config.seed)
        index, count = data_shard(self.config.mesh.make())
        with under("input"):
            source: Input = cfg.build(process_index=index, process_count=count)
        known = getattr(self.config.model, "vocab_size", source.vocab_size)
        if known < source.vocab_size:
            raise ConfigError(
                f"model.vocab_size={known} is less than the vocab_size={source.vocab_size} of the input's tokenizer. "
                f"Set model.vocab_size to at least {source.vocab_size}."
            )
        return source

    def _check_same_run(self, folder: Path, held: bool) -> Diff:
        if not held:
            raise AxcoreError(f"there is no run to resume in {folder}. Omit --resume to start one.")
        allowed = identity.check(_earlier_config(folder / CONFIG_FILE), self.config, folder)
        if allowed and jax.process_index() == 0:
            print(f"resuming with these changes:\n{allowed}", file=sys.stderr)
            if any(change.path in ("steps", "minutes") for change in allowed):
                print("from here on, the learning rate follows the schedule for the new length", file=sys.stderr)
        return allowed


def _holds_run(folder: Path) -> bool:
    try:
        return (folder / CONFIG_FILE).exists() or (folder / model_folder.CHECKPOINTS).exists()
    except OSError as error:
        raise AxcoreError(f"cannot use the run folder {folder}: {files.os_reason(error)}") from error


def _earlier_config(path: Path) -> dict[str, str]:
    try:
        found, problem = parse_text(path.read_text()), "it does not contain a trainer's config"
    except (OSError, ValueError) as error:
        found, problem = {}, files.os_reason(error)
    if "." not in found:
        raise AxcoreError(
            f"cannot read the config of the earlier run in {path}: {problem}. Restore the file, or omit --resume to "
            f"move the run aside and start a new one."
        )
    return found


def fit(cfg: Trainer.Config, out: str | Path, *, resume: bool = False) -> dict[str, Json]:
    """Trains a config and returns its summary: `axcore.fit(cfg, out="runs/mine")`. See `Trainer.run`."""
    trainer: Trainer = cfg.build()
    return trainer.run(out, resume=resume)
