"""One attempt at a run: from the first compilation to the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

import axcore
from axcore import runtime
from axcore.config import AxcoreError
from axcore.module import Tree
from axcore.plugin import contributors
from axcore.runtime import signals
from axcore.train.callbacks.base import CallbackRequest, FinishedRun, RunInfo, StepInfo
from axcore.train.callbacks.group import Callbacks
from axcore.train.callbacks.snapshot import EvaluationAbandoned, Snapshot
from axcore.train.checkpoint import model_folder
from axcore.train.checkpoint.manager import Checkpointer
from axcore.train.data import Input
from axcore.train.data.form import batch_form
from axcore.train.errors import RunStopped, TrainingError
from axcore.train.files import Json, write_json
from axcore.train.run.budget import Budget
from axcore.train.run.compilations import compilations
from axcore.train.run.loop import Loop
from axcore.train.run.restoring import Evaluated, Meta, restore
from axcore.train.step.program import Program, TrainState

if TYPE_CHECKING:
    from axcore.train.run.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Objects that are built and validated before a run starts."""

    program: Program
    traced: jax.stages.Traced | None
    """The training step; None with `jax_disable_jit`."""
    callbacks: Callbacks
    input: Input


class Session:
    """One attempt at a run.

    Args:
        first: the first state, if the run starts from given weights.
    """

    def __init__(self, cfg: Trainer.Config, prepared: Prepared, folder: Path, first: TrainState | None):
        self.cfg, self.folder = cfg, folder
        self.program, self.callbacks, self.input = prepared.program, prepared.callbacks, prepared.input
        self.first, self.traced = first, prepared.traced
        self.plugins = contributors(cfg)
        self.batches = self.input.train_batches()
        self.checkpointer: Checkpointer = cfg.checkpointer.build(folder / model_folder.CHECKPOINTS)
        self.is_first = jax.process_index() == 0
        self.requests = runtime.Requests()
        self.asked: list[tuple[str, CallbackRequest]] = []
        self.due: set[str] = set()
        """Requests that became due during an evaluation."""
        self.compiled_before = compilations("train_step")
        self.train_seconds = 0.0
        self.evaluated: Evaluated = {}
        self.evaluation_due = False
        self.saved = 0
        """Step of the newest checkpoint. Kept here, since processes that look at the folder may see different ones."""
        self.total: int | None = cfg.steps
        self.began = time.monotonic()

    def run(self, resume: bool) -> dict[str, Json]:
        """Trains to the end and returns the summary."""
        try:
            loop = self._start(resume)
            self._train(loop)
            self.train_seconds = self.seconds
            self._evaluate(loop)
            self._save(loop)
            self.checkpointer.wait()
            if self.evaluation_due:  # a signal abandoned it
                self._end_early(loop)
            self._stop_alone(loop)
            return self._finish(loop)
        except BaseException as error:
            self.callbacks.fail(error)
            if isinstance(error, AxcoreError) and (failure := self.callbacks.failure_with(error)) is not None:
                raise failure from error
            raise
        finally:
            self._close()

    @property
    def seconds(self) -> float:
        """Duration of the run so far, including earlier attempts."""
        return time.monotonic() - self.began

    def _close(self) -> None:
        """Closes everything. An error that ended the run takes precedence over errors while closing."""
        failed: list[AxcoreError] = []
        self.callbacks.close()
        for part in (self.requests, self.batches, self.checkpointer):
            try:
                part.close()
            except AxcoreError as error:
                failed.append(error)
        if self.callbacks.failure is not None:
            failed.insert(0, self.callbacks.failure)
        if failed and sys.exception() is None:
            raise failed[0]

    def _start(self, resume: bool) -> Loop:
        """Compiles both steps and creates or restores the first state."""
        self._say("compiling the training step")
        batch = batch_form(self.cfg.input)
        traced, self.traced = self.traced, None
        step = self.program.compile_train(batch, traced)
        self.eval_step = self.program.compile_eval(batch)
        done = 0
        if resume and self.checkpointer.latest() is not None:
            found = restore(self.checkpointer, self.program, self.input)
            state, done = found.state, found.step
            self.batches.set_state(found.data)
            self.callbacks.set_states(found.meta["callbacks"])
            self.began -= found.meta["seconds"]
            self.evaluated, self.saved = found.meta["evaluated"], done
            self.evaluation_due = found.meta.get("evaluation_due", False)
            self._compare_plugins(found.meta["plugins"])
        else:
            given, self.first = self.first, None
            state = given or self.program.init(np.array(self.cfg.seed, np.uint32))
        if resume:
            self._say(f"resuming after step {done}" if done else "no checkpoint yet: starting at step 0")
        if self.total is not None and done > self.total:
            self._say(f"steps={self.total} is fewer than the {done} steps already done, so there is nothing to train")
        info = RunInfo(self.cfg, self.folder, self.input, self.program, done, self.total, resume)
        self.asked += self.callbacks.start(info)
        self._raise_failure()
        runtime.barrier("start")  # the first collective times out if processes reach it more than 30 s apart
        batches = map(self.program.place, self.batches)
        return Loop(step, state, batches, math.prod(batch["inputs"].shape), self._report, done)

    def _compare_plugins(self, before: Mapping[str, str]) -> None:
        if before != self.plugins:
            was, now = (", ".join(each.values()) or "no plugins" for each in (before, self.plugins))
            self._say(f"the checkpoint was written with {was}, but this run has {now}. The losses may differ.")

    def _say(self, text: str) -> None:
        if self.is_first:
            print(text, file=sys.stderr)

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.asked += self.callbacks.step(StepInfo(step, metrics, self.total))

    def _train(self, loop: Loop) -> None:
        cfg, budget, total = self.cfg, None, self.cfg.steps
        if total is None:
            assert cfg.minutes is not None
            budget = Budget(cfg.minutes, cfg.learner.schedule, self.folder, began=self.began)
            total = budget.total(loop.done)  # not that of the checkpoint, which may be for another time limit
        loop.state = _with_total(loop.state, total)
        while loop.done < total and not self._act(loop):
            loop.advance()
            if budget is not None:
                if (decided := budget.decide(loop.done)) is not None:
                    total = decided
                    loop.state = _with_total(loop.state, total)
                self.total = budget.expected
            if loop.done < total:
                self.asked += self.callbacks.due(loop.done)
        loop.flush()

    def _act(self, loop: Loop) -> bool:
        """Handles requests of callbacks and signals between two steps. Returns whether the run ends here."""
        self.checkpointer.check()
        if signals.stop_requested() is not None:
            self.requests.make("signal")
        if self.callbacks.failure is not None:
            self.requests.make("failure")
        now = self.requests.due()
        # A callback that receives the metrics of the last step may make further requests. With several processes, all
        # must flush at the same step, and only a deterministic request is known to all.
        if self.asked and (jax.process_count() == 1 or any(request.deterministic for _, request in self.asked)):
            loop.flush()
        now |= self._granted()
        self.evaluation_due |= "evaluate" in now
        if self.evaluation_due and not now & {"signal", "failure"}:
            self._evaluate(loop)
            now |= self._granted() | self.due  # a signal may have abandoned it
            self.due = set()
        if now & {"save", "signal", "failure"}:
            self._save(loop)
        if now & {"signal", "failure"}:
            self._end_early(loop)
        return "stop" in now

    def _granted(self) -> set[str]:
        """The requests of callbacks that every process handles now. Others wait for an agreed step."""
        asked, self.asked = self.asked, []
        now = set()
        for name, request in asked:
            wanted = {each for each in ("evaluate", "save", "stop") if getattr(request, each)}
            if request.stop:
                self._say(f"callbacks.{name} stops the run: {request.reason or 'no reason given'}")
            if request.deterministic or jax.process_count() == 1:
                now |= wanted
            elif self.is_first:
                for each in wanted:
                    self.requests.make(each)
        return now

    def _end_early(self, loop: Loop) -> None:
        self.checkpointer.wait()
        with runtime.together("failure"):
            self._raise_failure()
        number = signals.stop_requested() or signal.SIGTERM
        saved = f"saved after step {loop.done}. Resume it with --resume." if loop.done else "nothing was trained"
        raise RunStopped(f"{number.name}: stopped the run in {self.folder}: {saved}", number, loop.done)

    def _stop_alone(self, loop: Loop) -> None:
        """Ends the run if a signal arrived after the last step. A run of several processes finishes instead."""
        if jax.process_count() == 1 and signals.stop_requested() is not None:
            self._end_early(loop)

    def _raise_failure(self) -> None:
        if self.callbacks.failure is not None:
            raise self.callbacks.failure

    def _evaluate(self, loop: Loop) -> None:
        """Computes the metrics of all evaluators, at most once per step."""
        loop.flush()
        if self.evaluated.get("step") == loop.done:  # evaluated before the checkpoint that this run resumed from
            self.evaluation_due = False
            return

        def check() -> None:  # every process calls it before each validation batch
            if signals.stop_requested() is not None:
                self.requests.make("signal")
            self.due |= self.requests.due()
            if "signal" in self.due:
                raise EvaluationAbandoned

        self.evaluation_due = True
        model = Snapshot(loop.done, loop.state, self.input, self.program, self.eval_step, check)
        with contextlib.suppress(EvaluationAbandoned):
            metrics = self.callbacks.evaluate(model)
            self.evaluation_due = False
            if metrics:
                self.evaluated = {"step": loop.done, "metrics": metrics}
                self.asked += self.callbacks.evaluation(loop.done, metrics)
        loop.pause()

    def _save(self, loop: Loop) -> None:
        """Starts writing a checkpoint, after the metrics of all steps so far are on disk."""
        loop.flush()
        if loop.done == self.saved:
            return
        if not _all_finite(loop.state.params):
            raise TrainingError(
                f"the parameters after step {loop.done} are not finite. The step is not saved. Earlier checkpoints are "
                f"unchanged."
            )
        self.callbacks.checkpoint(loop.done)
        meta: Meta = {
            "seconds": self.train_seconds or self.seconds,
            "evaluated": self.evaluated,
            "evaluation_due": self.evaluation_due,
            "config": self.cfg.text(),
            "plugins": self.plugins,
            "input": self.input.identity(),
            "callbacks": self.callbacks.states(),
        }
        self.checkpointer.save(loop.done, loop.state, data=self._position(), meta=meta)
        self.saved = loop.done
        loop.pause()

    def _position(self) -> dict[str, Json]:
        """The position in the data, merged over all processes."""
        own = json.dumps(self.batches.get_state()).encode()
        return {key: state for part in runtime.gather("position", own) for key, state in json.loads(part).items()}

    def _finish(self, loop: Loop) -> dict[str, Json]:
        summary: dict[str, Json] = {
            **self.evaluated.get("metrics", {}),
            "steps": loop.done,
            "tokens": loop.done * loop.tokens_per_step,
            "tokens_per_second": loop.tokens_per_second,
            "train_seconds": self.train_seconds,
            "seconds": self.seconds,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(loop.state.params)),
            "compilations": compilations("train_step") - self.compiled_before,
            "host_ms_per_step": 1e3 * statistics.median(loop.host_seconds) if loop.host_seconds else None,
            "plugins": self.plugins,
            "versions": {"axcore": axcore.__version__, "jax": jax.__version__},
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        }
        model = self.program.fn.bind(loop.state.params, loop.state.model_state)
        summary = self.callbacks.end(FinishedRun(self.cfg, self.folder, model, self.input, summary))
        self._stop_alone(loop)
        if self.is_first:
            write_json(self.folder / "summary.json", summary)
        self._raise_failure()
        return summary


@jax.jit
def _all_finite(params: Tree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]))


def _with_total(state: TrainState, total: int) -> TrainState:
    return dataclasses.replace(state, total_steps=jax.device_put(np.int32(total), state.total_steps.sharding))
