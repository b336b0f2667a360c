"""Checkpoints: state, data position and metadata of a step in one folder, which is committed atomically."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TypedDict

import jax
from etils import epath
from jaxtyping import PyTree

import axcore.config
from axcore.config import AxcoreError, ConfigError, Configurable, OutOfMemory, PositiveInt, allocating
from axcore.runtime import processes
from axcore.runtime.errors import PeerFailed, RuntimeTimeout
from axcore.train.checkpoint import inventory
from axcore.train.checkpoint.state_layout import Layout, layout, listed, mismatches, named_leaves
from axcore.train.checkpoint.storage import COMMITTED, RECORD_FILE, Storage
from axcore.train.files import Json, os_reason


@dataclasses.dataclass(frozen=True)
class Restored:
    """The contents of a checkpoint: the state in the caller's structure, the data position and the metadata."""

    step: int
    state: PyTree
    data: Json
    meta: dict[str, Json]


class _Record(TypedDict):
    """Everything in a checkpoint except the arrays."""

    step: int
    data: Json
    meta: dict[str, Json]
    arrays: Layout


class Checkpointer(Configurable):
    """Saves and restores checkpoints below one folder, with one subfolder per step.

    Build it with `cfg.build(folder)`, where `folder` is a path that `etils.epath` accepts. Building it changes no file,
    so a reader may open the folder of a running job. In a run of several processes, every process calls `save`,
    `restore` and `wait` on a shared folder, and a failure of one process raises on all. Use it as a
    context manager, or call `close`: a save that is in progress when the interpreter exits is lost.

    An error in the background is raised by the next call of `check`, `save`, `wait` or `close`.
    """

    class Config(axcore.config.Config):
        keep: PositiveInt = 3
        """Number of newest checkpoints to keep."""
        keep_every: PositiveInt | None = None
        """Also keep the checkpoints of steps that are multiples of this."""
        asynchronous: bool = True
        """Write in the background. `save` then returns after the copy to host memory."""

    def __init__(self, cfg: Config, folder: str | os.PathLike[str]):
        self.config = cfg
        self.folder = epath.Path(folder)
        if inventory.is_local(self.folder):
            self.folder = self.folder.absolute()
        elif not str(self.folder).startswith("gs://"):
            raise ConfigError(
                f"cannot keep checkpoints in {self.folder}, since Orbax cannot write there. Give a gs:// path or a "
                f"folder in a file system, such as a mounted bucket."
            )
        self._storage = Storage(self.folder, cfg.keep, cfg.keep_every)
        self._thread: threading.Thread | None = None
        self._failure: AxcoreError | None = None

    def save(self, step: int, state: PyTree, *, data: Json, meta: Mapping[str, object]) -> None:
        """Saves one checkpoint. When it returns, the arrays of `state` may be donated.

        Waits for the previous save first.

        Args:
            step: number of steps done; names the checkpoint.
            state: any pytree of jax arrays, numpy arrays and typed PRNG keys.
            data: position in the input, the same on all processes.
            meta: anything that JSON can hold. The method `meta` reads it without the arrays.

        Raises:
            AxcoreError: the folder cannot be written (the message names it and the reason), it has a checkpoint of this
                or a later step, or `state`, `data` or `meta` cannot be stored. Earlier checkpoints are unchanged.
        """
        self.wait()
        named = named_leaves(state)
        try:
            record = json.loads(json.dumps({"step": step, "meta": meta, "data": data, "arrays": layout(named)}))
        except (TypeError, ValueError) as error:
            raise AxcoreError(f"the metadata of checkpoint {self.folder / str(step)} is not JSON: {error}") from error
        with processes.together(f"save-{step}"):  # Orbax's own barriers do not name the missing process
            self._prepare(step)
        try:
            self._storage.save(step, named, record)
        except Exception as error:
            self._give_up()
            raise self._cannot_write(step, error) from error
        self._thread = threading.Thread(target=self._finish, args=(step,), name="axcore-checkpoint")
        self._thread.start()
        if not self.config.asynchronous:
            self.wait()

    def check(self) -> None:
        """Raises an error that occurred in the background since the last call. Cheap enough for every step."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first. Saves that are in progress or failed do not count."""
        try:
            if not self.folder.is_dir():
                return []
            names = [path.name for path in self.folder.iterdir() if path.name.isdecimal()]
            # In an object store, a folder is visible before the commit. In a file system, it is visible only after the
            # commit, but may not be a checkpoint.
            marks = (inventory.NAME, RECORD_FILE) if inventory.is_local(self.folder) else (COMMITTED,)
            return sorted(int(name) for name in names if any((self.folder / name / mark).exists() for mark in marks))
        except OSError as error:
            raise AxcoreError(f"cannot list the checkpoints in {self.folder}: {os_reason(error)}") from error

    def latest(self) -> int | None:
        """The newest step that can be restored, or None."""
        return max(self.steps(), default=None)

    def meta(self, step: int | None = None) -> dict[str, Json]:
        """The metadata of a checkpoint (by default the newest), without reading any array.

        Raises:
            AxcoreError: the checkpoint does not exist or cannot be read.
        """
        return self._record(self._chosen(step))["meta"]

    def layout(self, step: int | None = None) -> Layout:
        """The dtype and shape of each array of a checkpoint, by path. Raises like `meta`."""
        return self._record(self._chosen(step))["arrays"]

    def restore(
        self, abstract_state: PyTree, step: int | None = None, *, subset: bool = False, cast: bool = False
    ) -> Restored:
        """Reads the checkpoint of `step`, or the newest if `step` is None. Never falls back to another checkpoint.

        Args:
            abstract_state: the state's structure with a `jax.ShapeDtypeStruct` (or an array) for each array. The array
                is restored to its `sharding`, whatever mesh it was saved from, or to jax's default device if it has
                none.
            step: number of steps done.
            subset: skip stored arrays that `abstract_state` lacks (a server does not load the optimizer state).
            cast: convert floating-point arrays to the floating-point dtypes of `abstract_state`.

        Raises:
            AxcoreError: the checkpoint does not exist; its arrays differ from `abstract_state` in path, shape or dtype
                (the message lists the paths); or it is damaged (the message names the next older step).
            OutOfMemory: the arrays do not fit in memory.
        """
        self.wait()
        step = self._chosen(step)
        wanted = named_leaves(abstract_state)
        with processes.together(f"restore-{step}"):
            record = self._record(step)
            if found := mismatches(record["arrays"], wanted, subset=subset, cast=cast):
                raise AxcoreError(f"checkpoint {self.folder / str(step)} does not fit this state:{listed(found)}")
            self._check_files(step, part=(jax.process_index(), jax.process_count()))
        advice = "Divide them between more devices, or use devices with more memory"
        try:
            with allocating(f"the arrays of checkpoint {self.folder / str(step)}", advice):
                arrays = self._storage.restore(step, wanted)
        except OutOfMemory:
            raise
        except Exception as error:
            raise self._damaged(step, os_reason(error)) from error
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[path] for path in wanted])
        return Restored(step, state, record["data"], record["meta"])

    def wait(self) -> None:
        """Waits until the current save, if any, is committed and old checkpoints are removed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def close(self) -> None:
        """Waits for the current save and ends the background threads."""
        try:
            self.wait()
        finally:
            self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, step: int) -> None:
        """Prepares the folder for a save. In a run of several processes, the first one makes a trial write, since an
        error inside Orbax would leave the others waiting."""
        if jax.process_index() != 0:
            return
        if any(held >= step for held in self.steps()):  # retention would delete it first, as the oldest
            raise AxcoreError(
                f"cannot save step {step}: {self.folder} has checkpoints of steps {_joined(self.steps())}. "
                f"Resume from the last one, or remove the checkpoints of step {step} and later."
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._storage.clear()
            if jax.process_count() > 1:
                self._storage.probe(step)
        except OSError as error:
            raise self._cannot_write(step, error) from error

    def _finish(self, step: int) -> None:
        """Waits for the commit. Runs in the background thread."""
        try:
            self._storage.wait()
        except BaseException as error:
            self._give_up()
            self._failure = self._cannot_write(step, error)
            self._failure.__cause__ = error

    def _give_up(self) -> None:
        """Cleans up after a failed save."""
        self._storage.reset()
        if jax.process_index() == 0:
            self._storage.clear()

    def _cannot_write(self, step: int, error: BaseException) -> AxcoreError:
        what = f"cannot write checkpoint {self.folder / str(step)}"
        if isinstance(error, PeerFailed | RuntimeTimeout):
            return type(error)(f"{what}: {error}")
        return AxcoreError(f"{what}: {os_reason(error)}")

    def _chosen(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise AxcoreError(f"there is no checkpoint in {self.folder}")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise AxcoreError(f"there is no checkpoint of step {step} in {self.folder}. It has steps {_joined(steps)}.")
        return step

    def _record(self, step: int) -> _Record:
        self._check_files(step, only=RECORD_FILE)
        record: _Record = json.loads((self.folder / str(step) / RECORD_FILE).read_bytes())
        if record["step"] != step:
            raise self._damaged(step, f"it was saved as step {record['step']}")
        return record

    def _check_files(self, step: int, only: str | None = None, part: tuple[int, int] = (0, 1)) -> None:
        try:
            inventory.check(self.folder / str(step), only, part)
        except inventory.CorruptFile as error:
            raise self._damaged(step, str(error)) from error
        except OSError as error:
            raise self._damaged(step, os_reason(error)) from error

    def _damaged(self, step: int, what: str) -> AxcoreError:
        older = [other for other in self.steps() if other < step]
        advice = (
            f"To resume from step {older[-1]} instead, move the damaged one away."
            if older
            else "There is no older checkpoint to resume from."
        )
        return AxcoreError(f"checkpoint {self.folder / str(step)} is damaged ({what}). {advice}")


def _joined(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
