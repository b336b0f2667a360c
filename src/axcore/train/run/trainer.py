"""The trainer: from a config to a trained run folder."""

from __future__ import annotations

import contextlib
import io
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axcore
from axcore import config
from axcore.config import REQUIRED, AxcoreError, ConfigError, at_least, diff_flat, flatten, parse_text, under
from axcore.parallel import Mesh
from axcore.plugin import active
from axcore.runtime.processes import together
from axcore.train import files
from axcore.train.callbacks.progress import Progress
from axcore.train.callbacks.report import FinishedRun, Report
from axcore.train.callbacks.writers import JsonlWriter, TensorBoardWriter, Writer
from axcore.train.checkpoint import model_folder
from axcore.train.checkpoint.initial import Initial, begin
from axcore.train.checkpoint.manager import Checkpointer
from axcore.train.data import Input, check_identity
from axcore.train.run import folder as run_folder
from axcore.train.run.agreement import agree
from axcore.train.run.budget import Budget
from axcore.train.run.compilations import compilations
from axcore.train.run.loop import Loop, TrainingError
from axcore.train.step.learner import Learner
from axcore.train.step.objective import CrossEntropy, Objective
from axcore.train.step.program import Program, TrainState, program

CONFIG_FILE = "config.txt"
MOST_MINUTES = 10_000_000


class Trainer(config.Configurable):
    """Trains `model` on `input` with `learner`, for a number of steps or of minutes."""

    class Config(config.Config):
        model: config.Config = REQUIRED
        input: Input.Config = REQUIRED
        objective: Objective.Config = CrossEntropy.Config()
        learner: Learner.Config = Learner.Config()
        microbatches: int = 1
        """Parts of each batch that are computed one after the other, with the gradients of the whole: less memory for
        activations."""
        mesh: Mesh = Mesh()
        steps: int | None = None
        minutes: float | None = None
        """Wall-clock time for training, compilation included. Give this or `steps`."""
        initial: Initial.Config | None = None
        """Weights to start from; None: the model's initializers."""
        seed: int = 0
        evaluate_every: int | None = None
        """Steps between evaluations; None: at the end only."""
        checkpointer: Checkpointer.Config = Checkpointer.Config()
        writers: tuple[Writer.Config, ...] = (JsonlWriter.Config(), TensorBoardWriter.Config())
        reports: tuple[Report.Config, ...] = ()

    def __init__(self, cfg: Config):
        if (cfg.steps is None) == (cfg.minutes is None):
            raise ConfigError(
                f"set one of steps and minutes, not steps={cfg.steps} and minutes={cfg.minutes} (of the command "
                f"line's --steps and --minutes each clears the other)"
            )
        at_least(cfg, 1, "steps", "evaluate_every", "microbatches")
        if cfg.minutes is not None and not 0 < cfg.minutes < MOST_MINUTES:
            raise ConfigError(f"minutes must be positive and below {MOST_MINUTES:,}, not {cfg.minutes}")
        if not 0 <= cfg.seed < 2**32:
            raise ConfigError(f"seed must be from 0 to 2**32 - 1, not {cfg.seed}")
        self.config = cfg

    def program(self) -> Program:
        """The steps that this config describes, as shapes; nothing is computed."""
        cfg = self.config
        return program(cfg.model, cfg.learner, cfg.mesh.make(), cfg.objective, cfg.microbatches)

    def run(self, out: str | Path, *, resume: bool = False) -> dict[str, Any]:
        """Trains and returns the summary that is also written to `summary.json`.

        With several processes (`jax.distributed`) each calls it, with a folder that all of them see. The first writes
        metrics and summary; reports are not made.

        Args:
            out: the run folder. A run that it holds already is moved aside, unless it is resumed.
            resume: go on from the newest checkpoint, to the same losses as if nothing had happened.

        Raises:
            AxcoreError: the config, the input or the folder cannot be used, or processes have different ones; nothing
                was trained.
            TrainingError: the loss is not finite any more.
        """
        agree(self.config)
        folder = Path(out).expanduser().absolute()
        with contextlib.ExitStack() as stack:
            with together():
                prepared, source, state = self._prepare(folder, resume)
                if jax.process_index() == 0:
                    folder = run_folder.create(folder)
                    stack.enter_context(run_folder.Lock(folder))
                    files.write_text(folder / CONFIG_FILE, self.config.text())
                    model_folder.write_config(folder, self.config)
            return _Run(self.config, prepared, source, folder, state).run(resume)

    def _prepare(self, folder: Path, resume: bool) -> tuple[Program, Any, TrainState | None]:
        """Program, input and the first state where it starts from given weights; with all that can be refused refused,
        and the folder free for this run."""
        if self.config.minutes is not None and jax.process_count() > 1:
            raise ConfigError(
                f"minutes={self.config.minutes} needs a run of one process, since each would count its own; this one "
                f"has {jax.process_count()}: set steps instead"
            )
        held = _holds_run(folder)
        if resume:
            self._check_same_run(folder, held)
        source = self._input()
        prepared = self.program()
        prepared.batch_shapes(batch_form(self.config.input))
        checkpointer = self.config.checkpointer.build(folder / model_folder.CHECKPOINTS)  # refuses bad values
        for report in self.config.reports:
            report.build()
        state = None
        if self.config.initial is not None and not (resume and checkpointer.latest() is not None):
            state = begin(self.config.initial, self.config.model, prepared, np.array(self.config.seed, np.uint32))
        if not resume and held and jax.process_index() == 0:
            with run_folder.Lock(folder):
                print(f"{folder} held an earlier run; it is now {run_folder.move_aside(folder)}")
        return prepared, source, state

    def _input(self) -> Any:
        cfg = self.config.input
        if cfg.seed is None:
            cfg = cfg.set(seed=self.config.seed)
        with under("input"):
            source = cfg.build(process_index=jax.process_index(), process_count=jax.process_count())
        known = getattr(self.config.model, "vocab_size", source.vocab_size)
        if known < source.vocab_size:
            raise ConfigError(f"model.vocab_size={known} is less than the {source.vocab_size} of the input's tokenizer")
        return source

    def _check_same_run(self, folder: Path, held: bool) -> None:
        described = folder / CONFIG_FILE
        if not held:
            raise AxcoreError(f"there is no run to resume in {folder}; leave --resume out to start one")
        changed = diff_flat(parse_text(described.read_text()), flatten(self.config))
        if changed:
            raise ConfigError(
                f"the run in {folder} has another config; resume it with the same recipe and flags, or choose another "
                f"folder. It differs in:\n{changed}"
            )


def _holds_run(folder: Path) -> bool:
    try:
        return (folder / CONFIG_FILE).exists()
    except OSError as error:
        raise AxcoreError(f"cannot use the run folder {folder}: {files.os_reason(error)}") from error


def batch_form(cfg: Input.Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The form of a batch."""
    return {name: jax.ShapeDtypeStruct(*each) for name, each in cfg.target.batch_spec(cfg).items()}


@jax.jit
def _all_finite(params: Any) -> jax.Array:
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]))


class _Run:
    """One call of `Trainer.run`."""

    def __init__(self, cfg: Any, prepared: Program, source: Any, folder: Path, state: TrainState | None):
        self.cfg, self.program, self.source, self.folder, self.first = cfg, prepared, source, folder, state
        self.plugins = active(cfg)
        self.batches = source.train_batches()
        self.checkpointer: Checkpointer = cfg.checkpointer.build(folder / model_folder.CHECKPOINTS)
        self.is_first = jax.process_index() == 0
        self.writers: list[Writer] = [writer.build(folder) for writer in cfg.writers] if self.is_first else []
        self.compiled_before = compilations("train_step")
        self.train_seconds = 0.0
        self.evaluated: dict[str, Any] = {}
        self.began = time.monotonic()

    def run(self, resume: bool) -> dict[str, Any]:
        try:
            loop = self._start(resume)
            with loop.progress:
                self._train(loop)
                self.train_seconds = self.seconds
                loop.progress.note("evaluating")
                bits = self._evaluate(loop)
                self._save(loop)
                self.checkpointer.wait()
        finally:
            self._close()
        return self._finish(loop, bits)

    def _close(self) -> None:
        """Closes everything, whatever of it fails. The error that ended the run comes before those of closing."""
        failed: list[AxcoreError] = []
        for part in (*self.writers, self.batches, self.checkpointer):
            try:
                part.close()
            except AxcoreError as error:
                failed.append(error)
        if failed and sys.exception() is None:
            raise failed[0]

    @property
    def seconds(self) -> float:
        """Time since the run began, earlier attempts included."""
        return time.monotonic() - self.began

    def _start(self, resume: bool) -> Loop:
        """Compiles both steps and makes, or restores, the first state."""
        self._say("compiling the training step")
        batch = batch_form(self.cfg.input)
        step = self.program.compile_train(batch)
        self.eval_step = self.program.compile_eval(batch)
        if resume and self.checkpointer.latest() is not None:
            restored = self.checkpointer.restore(self.program.state)
            state, done = restored.state, restored.step
            saved = json.loads(restored.data)
            check_identity(saved["identity"], self.source.identity())
            self.batches.set_state(saved["streams"])
            self.began -= restored.meta["seconds"]
            self.evaluated = restored.meta["evaluated"]
            if (before := restored.meta["plugins"]) != self.plugins:
                was, now = (", ".join(each.values()) or "no plugins" for each in (before, self.plugins))
                print(f"the checkpoint was written with {was}; this is {now}, and may go on otherwise", file=sys.stderr)
        else:
            given, self.first = self.first, None
            state, done = given or self.program.init(np.array(self.cfg.seed, np.uint32)), 0
        if resume:
            self._say(f"resuming after step {done}" if done else "no checkpoint yet: starting over")
            for writer in self.writers:
                writer.rewind(done)
        progress = Progress(total=self.cfg.steps, start=done, stream=None if self.is_first else io.StringIO())
        batches = map(self.program.place, self.batches)
        return Loop(step, state, batches, batch["inputs"].size, self.writers, progress, done)

    def _say(self, text: str) -> None:
        if self.is_first:
            print(text, file=sys.stderr)

    def _train(self, loop: Loop) -> None:
        cfg, budget, total = self.cfg, None, int(loop.state.total_steps)
        if cfg.steps is not None:
            total = cfg.steps
            loop.state = _with_total(loop.state, total)
        else:
            budget = Budget(cfg.minutes, cfg.learner.schedule, self.folder, began=self.began)
        while loop.done < total:
            loop.advance()
            if budget is not None and (decided := budget.decide(loop.done)) is not None:
                total = decided
                loop.state = _with_total(loop.state, total)
            if budget is not None and budget.expected is not None:
                loop.progress.set_total(budget.expected)
            if loop.done == total:
                break
            if cfg.evaluate_every and loop.done % cfg.evaluate_every == 0:
                self._evaluate(loop)
            if self.checkpointer.should_save(loop.done, time.monotonic()):
                self._save(loop)
        loop.flush()

    def _evaluate(self, loop: Loop) -> float:
        """Validation bits per byte, reported as of the steps done."""
        loop.flush()
        if self.evaluated.get("step") == loop.done:  # before the checkpoint that was resumed from
            return float(self.evaluated["bits_per_byte"])
        nats = count = 0.0
        for batch in self.source.validation_batches():
            placed = self.program.place(batch)
            summed, weights = self.eval_step(loop.state.params, loop.state.model_state, placed)
            nats, count = nats + float(summed), count + float(weights)
        bits = nats / math.log(2) / self.source.validation_byte_count
        if not math.isfinite(bits):
            raise TrainingError(f"the validation loss after step {loop.done} is {bits}; earlier checkpoints are kept")
        for writer in self.writers:
            writer.write(loop.done, {"eval/bits_per_byte": bits, "eval/loss": nats / count})
        self.evaluated = {"step": loop.done, "bits_per_byte": bits}
        loop.pause()
        return bits

    def _save(self, loop: Loop) -> None:
        """Starts to save a checkpoint. What it stands for is in the metrics before it can be resumed from."""
        loop.flush()
        if self.checkpointer.latest() == loop.done:
            return
        if not _all_finite(loop.state.params):
            raise TrainingError(
                f"step {loop.done} made parameters that are not finite; it is not saved, earlier checkpoints are kept"
            )
        for writer in self.writers:
            writer.flush()
        meta = {
            "seconds": self.train_seconds or self.seconds,
            "evaluated": self.evaluated,
            "config": self.cfg.text(),
            "plugins": self.plugins,
        }
        data = {"identity": self.source.identity(), "streams": self.batches.get_state()}
        self.checkpointer.save(loop.done, loop.state, data=json.dumps(data).encode(), meta=meta)
        loop.pause()

    def _finish(self, loop: Loop, bits: float) -> dict[str, Any]:
        tokens = loop.done * loop.tokens_per_batch
        summary: dict[str, Any] = {
            "val_bits_per_byte": bits,
            "steps": loop.done,
            "tokens": tokens,
            "tokens_per_second": tokens / self.train_seconds,
            "train_seconds": self.train_seconds,
            "seconds": self.seconds,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(loop.state.params)),
            "compilations": compilations("train_step") - self.compiled_before,
            "host_ms_per_step": 1e3 * statistics.median(loop.host_seconds) if loop.host_seconds else None,
            "plugins": self.plugins,
            "versions": {"axcore": axcore.__version__, "jax": jax.__version__},
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        }
        if jax.process_count() == 1:  # a report may compute with the model, which all processes would have to do
            model = self.program.fn.bind(loop.state.params, loop.state.model_state)
            for report in self.cfg.reports:
                finished = FinishedRun(self.cfg, self.folder, model, self.source, summary)
                summary |= report.build()(finished)
        if self.is_first:
            files.write_json(self.folder / "summary.json", summary)
        return summary


def _with_total(state: TrainState, total: int) -> TrainState:
    state.total_steps = jax.device_put(np.int32(total), state.total_steps.sharding)
    return state


def fit(cfg: Trainer.Config, out: str | Path, *, resume: bool = False) -> dict[str, Any]:
    """Trains a config and returns its summary: `axcore.fit(cfg, out="runs/mine")`. See `Trainer.run`."""
    return cfg.build().run(out, resume=resume)
