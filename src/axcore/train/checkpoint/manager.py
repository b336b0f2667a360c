"""Checkpoints: state, data position and metadata in one folder, which is there whole or not at all."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import pathlib
import threading
from types import TracebackType
from typing import Any, Self

import jax

import axcore.config
from axcore.config import AxcoreError, ConfigError, Configurable, type_name
from axcore.runtime.processes import barrier, gather
from axcore.train.checkpoint import folder as checkpoint_folder, inventory, state_layout
from axcore.train.checkpoint.folder import TEMPORARY
from axcore.train.checkpoint.format import CheckpointFormat
from axcore.train.checkpoint.orbax_format import OrbaxFormat
from axcore.train.checkpoint.save_policy import SavePolicy
from axcore.train.files import os_reason

RECORD = "record.json"
"""The file that holds all of a checkpoint but the arrays."""
ARRAYS = "state"
"""The folder that the format writes."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held: the state in the caller's structure, the data position and the metadata."""

    step: int
    state: Any
    data: bytes
    meta: dict[str, Any]


class Checkpointer(Configurable):
    """Saves and restores checkpoints below one folder, a subfolder for each step.

    Built as `cfg.build(folder)`; that touches nothing, so a reader may do it beside a run that writes. With
    several processes each calls every method, on a folder that all of them see. Use it as a context manager,
    or call `close`: a save that is under way when the interpreter exits is lost.

    A background failure is raised by the next call of `should_save`, `save`, `wait` or `close`.
    """

    class Config(axcore.config.Config):
        every_steps: int | None = None
        """Save each time that many steps are done."""
        every_minutes: float | None = 10.0
        """Save when that many minutes have passed since the last save."""
        keep: int = 3
        """Newest checkpoints to keep; at least 1."""
        asynchronous: bool = True
        """Write behind the training's back; `save` then takes as long as a copy to host memory."""
        format: CheckpointFormat.Config = OrbaxFormat.Config()
        """How the arrays lie on disk."""

    def __init__(self, cfg: Config, folder: pathlib.Path):
        if cfg.keep < 1:
            raise ConfigError(f"checkpointer.keep is {cfg.keep}; at least 1 checkpoint must be kept")
        self.cfg = cfg
        self.folder = pathlib.Path(folder).absolute()
        self._format: CheckpointFormat = cfg.format.build()
        self._thread: threading.Thread | None = None
        self._failure: AxcoreError | None = None
        self._saved_step: int | None = None
        self._policy = SavePolicy(cfg.every_steps, cfg.every_minutes)

    def should_save(self, step: int, now: float) -> bool:
        """Whether a checkpoint is due after `step` steps. True restarts the clock of `every_minutes`.

        Call it once after each step; `now` is in seconds, as of `time.monotonic()`. All processes get one
        answer.
        """
        self._raise_failure()
        return self._policy.due(step, now) and step != self._saved_step

    def save(self, step: int, state: Any, *, data: bytes, meta: dict[str, Any]) -> None:
        """Saves one checkpoint. When it returns, the arrays of `state` may be donated.

        It waits for the save before it. Saving a step again that this object has just saved does nothing.

        Args:
            step: number of steps done; names the checkpoint.
            state: any pytree of jax or numpy arrays; typed PRNG keys too.
            data: this process's position in its input, opaque.
            meta: anything that JSON can hold; `meta` reads it back without the arrays.

        Raises:
            AxcoreError: the folder cannot be written (names it and the reason), it has a step that is not
                earlier, or `state` or `meta` cannot be stored. Earlier checkpoints are as they were.
        """
        self.wait()
        if step == self._saved_step:
            return
        target, partial = self.folder / str(step), self.folder / f"{step}{TEMPORARY}"
        named = state_layout.named_leaves(state)
        try:
            record = json.loads(json.dumps({"step": step, "meta": meta}))
        except (TypeError, ValueError) as error:
            raise AxcoreError(f"the metadata of checkpoint {target} is not JSON: {error}") from error
        if any(held >= step for held in self.steps()):  # it would be the first to go, as the oldest
            raise AxcoreError(
                f"cannot save step {step}: {self.folder} has checkpoints of {_joined(self.steps())}; "
                f"resume from the last, or remove those from step {step} on"
            )
        record["format"] = type_name(type(self.cfg.format))
        record["arrays"] = state_layout.layout(named)
        try:
            if self._is_first:
                self.folder.mkdir(parents=True, exist_ok=True)
                checkpoint_folder.clear_leftovers(self.folder)
                partial.mkdir()
            record["data"] = [base64.b64encode(part).decode() for part in gather(f"saving step {step}", data)]
            # From here on every process finds the folder, since all have met.
            if self._is_first:
                (partial / RECORD).write_text(json.dumps(record))
            self._format.save(partial / ARRAYS, state_layout.stored(named))
        except Exception as error:
            self._give_up()
            raise _cannot("write", target, error) from error
        self._thread = threading.Thread(target=self._finish, args=(partial, target, step), name="axcore-checkpoint")
        self._thread.start()
        if not self.cfg.asynchronous:
            self.wait()

    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first."""
        return checkpoint_folder.steps(self.folder)

    def latest(self) -> int | None:
        """The newest step that can be restored, or None. A save that is under way does not count."""
        return max(self.steps(), default=None)

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """The metadata of a checkpoint (of the latest, by default), without reading an array.

        Raises:
            AxcoreError: there is no such checkpoint, or it cannot be read.
        """
        return self._record(self._chosen(step))["meta"]

    def restore(self, abstract_state: Any, step: int | None = None, *, subset: bool = False) -> Restored:
        """Reads a checkpoint: the latest, or that of `step`. Never another one in its place.

        Args:
            abstract_state: the state's structure with a `jax.ShapeDtypeStruct` (or an array) for each array.
                Its `sharding` says where the array goes, whatever mesh it was saved from; without one, to
                where jax puts new arrays.
            step: number of steps done.
            subset: leave out the stored arrays that `abstract_state` does not name (a server needs no
                optimizer), and the data position.

        Raises:
            AxcoreError: there is no such checkpoint; its arrays differ from `abstract_state` in path, shape
                or dtype (the paths are named); or it is damaged (the next older step is named).
        """
        self.wait()
        step = self._chosen(step)
        record = self._record(step)
        target = self.folder / str(step)
        wanted = state_layout.named_leaves(abstract_state)
        own = type_name(type(self.cfg.format))
        if record["format"] != own:
            raise AxcoreError(
                f"checkpoint {target} is in the format {record['format']}; checkpointer.format is {own}: set the former"
            )
        found = state_layout.mismatches(record["arrays"], wanted, subset=subset)
        if found:
            raise AxcoreError(f"checkpoint {target} does not fit this state:{state_layout.listed(found)}")
        self._check_files(step)
        try:
            read = self._format.restore(target / ARRAYS, state_layout.abstract_stored(wanted))
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            raise self._damaged(step, os_reason(error)) from error
        leaves = state_layout.restored(wanted, read)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        data = b"" if subset else self._own_data(record, target)
        return Restored(step, state, data, record["meta"])

    def rewind(self, step: int) -> None:
        """Removes the checkpoints after `step`: the run resumes there and will come to those steps again."""
        self.wait()
        if self._is_first:
            checkpoint_folder.clear_leftovers(self.folder)
            for later in self.steps():
                if later > step:
                    checkpoint_folder.remove(self.folder, later)
        barrier("removing checkpoints")  # the others go on when they are gone
        self._saved_step = None

    def wait(self) -> None:
        """Returns when the save under way, if any, is committed and checkpoints beyond `keep` are gone."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def close(self) -> None:
        """Waits, and lets the format go of its threads."""
        try:
            self.wait()
        finally:
            self._format.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _is_first(self) -> bool:
        return jax.process_index() == 0

    def _finish(self, partial: pathlib.Path, target: pathlib.Path, step: int) -> None:
        """In the background: waits for the arrays, commits, and removes old checkpoints."""
        try:
            self._format.wait()
            if self._is_first:
                checkpoint_folder.commit(partial, target, checksums=jax.process_count() == 1)
        except BaseException as error:
            self._failure = _cannot("write", target, error)
            self._failure.__cause__ = error
            self._give_up()
            return
        self._saved_step = step
        if self._is_first:
            try:
                for old in self.steps()[: -self.cfg.keep]:
                    checkpoint_folder.remove(self.folder, old)
            except AxcoreError as error:
                self._failure = error

    def _give_up(self) -> None:
        """After a failed save. The format's object may raise its failure again: the next save has another."""
        with contextlib.suppress(Exception):
            self._format.close()
        self._format = self.cfg.format.build()
        if self._is_first:
            checkpoint_folder.clear_leftovers(self.folder)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _chosen(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise AxcoreError(f"there is no checkpoint in {self.folder}")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise AxcoreError(f"there is no checkpoint of step {step} in {self.folder}; it has {_joined(steps)}")
        return step

    def _record(self, step: int) -> dict[str, Any]:
        self._check_files(step, only=RECORD)
        try:
            record = json.loads((self.folder / str(step) / RECORD).read_bytes())
            if record["step"] != step or not {"meta", "arrays", "data", "format"} <= record.keys():
                raise ValueError(f"its record is of step {record['step']}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(step, os_reason(error)) from error
        return record

    def _check_files(self, step: int, only: str = "") -> None:
        try:
            damage = inventory.damage(self.folder / str(step), only)
        except (OSError, ValueError) as error:
            raise self._damaged(step, f"{inventory.NAME}: {os_reason(error)}") from error
        if damage:
            raise self._damaged(step, damage)

    def _damaged(self, step: int, what: str) -> AxcoreError:
        older = [other for other in self.steps() if other < step]
        advice = (
            f"to resume from step {older[-1]} instead, move that folder away"
            if older
            else "there is no older checkpoint to resume from"
        )
        return AxcoreError(f"checkpoint {self.folder / str(step)} is damaged ({what}); {advice}")

    def _own_data(self, record: dict[str, Any], target: pathlib.Path) -> bytes:
        positions = record["data"]
        if len(positions) != jax.process_count():
            raise AxcoreError(
                f"checkpoint {target} holds the data positions of {len(positions)} processes, and this run "
                f"has {jax.process_count()}; resume with as many as before"
            )
        return base64.b64decode(positions[jax.process_index()])


def _cannot(do: str, path: pathlib.Path, error: BaseException) -> AxcoreError:
    return AxcoreError(f"cannot {do} checkpoint {path}: {os_reason(error)}")


def _joined(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether it is the memory that failed, of the host or of a device, and not the disk."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED: Out of memory" in str(error)
