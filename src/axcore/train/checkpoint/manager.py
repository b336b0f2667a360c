"""Checkpoints: state, data position and metadata of a step in one folder, which is there whole or not at all."""

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
from axcore.config import AxcoreError, ConfigError, Configurable
from axcore.runtime import processes
from axcore.runtime.errors import PeerFailed, RuntimeTimeout
from axcore.train.checkpoint import inventory
from axcore.train.checkpoint.state_layout import Layout, layout, listed, mismatches, named_leaves
from axcore.train.checkpoint.storage import COMMITTED, RECORD_FILE, Storage
from axcore.train.files import Json, os_reason


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint holds: the state in the caller's structure, the data position and the metadata."""

    step: int
    state: PyTree
    data: Json
    meta: dict[str, Json]


class _Record(TypedDict):
    """Everything of a checkpoint but the arrays."""

    step: int
    data: Json
    meta: dict[str, Json]
    arrays: Layout


class Checkpointer(Configurable):
    """Saves and restores checkpoints below one folder, a subfolder for each step.

    Built as `cfg.build(folder)` with a path that `etils.epath` knows. Building touches nothing, so a reader may do it
    beside a run that writes. With several processes each calls `save`, `restore`, `delete_after` and `wait`, on a
    folder that all of them see; a failure of one is raised by all. Use it as a context manager, or call `close`: a
    save that is under way when the interpreter exits is lost.

    The next call of `check`, `save`, `wait` or `close` raises what failed in the background.
    """

    class Config(axcore.config.Config):
        keep: int = 3
        """Newest checkpoints to keep; at least 1."""
        keep_every: int | None = None
        """Also keep the checkpoints of steps that are multiples of this."""
        asynchronous: bool = True
        """Write in the background; `save` then takes as long as a copy to host memory."""

    def __init__(self, cfg: Config, folder: str | os.PathLike[str]):
        for name, value in (("keep", cfg.keep), ("keep_every", cfg.keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"checkpointer.{name} is {value}; it must be at least 1")
        self.cfg = cfg
        self.folder = epath.Path(folder)
        if inventory.is_local(self.folder):
            self.folder = self.folder.absolute()
        elif not str(self.folder).startswith("gs://"):
            raise ConfigError(
                f"checkpoints cannot be in {self.folder}, since Orbax does not write there; give gs://, or a folder of "
                f"a file system (a bucket may be mounted as one)"
            )
        self._storage = Storage(self.folder, cfg.keep, cfg.keep_every)
        self._thread: threading.Thread | None = None
        self._failure: AxcoreError | None = None
        self._saved_step: int | None = None

    def save(self, step: int, state: PyTree, *, data: Json, meta: Mapping[str, object]) -> None:
        """Saves one checkpoint. When it returns, the arrays of `state` may be donated.

        It waits for the save before it. Saving the step again that this object has just saved does nothing.

        Args:
            step: number of steps done; names the checkpoint.
            state: any pytree of jax or numpy arrays; typed PRNG keys too.
            data: position in the input, the same on all processes.
            meta: anything that JSON can hold; `meta` reads it back without the arrays.

        Raises:
            AxcoreError: the folder cannot be written (names it and the reason), it has a step that is not earlier, or
                `state`, `data` or `meta` cannot be stored. Earlier checkpoints are as they were.
        """
        self.wait()
        if step == self._saved_step:
            return
        named = named_leaves(state)
        try:
            record = json.loads(json.dumps({"step": step, "meta": meta, "data": data, "arrays": layout(named)}))
        except (TypeError, ValueError) as error:
            raise AxcoreError(f"the metadata of checkpoint {self.folder / str(step)} is not JSON: {error}") from error
        with processes.together(f"save-{step}"):  # all meet here, since Orbax's own barriers hide who is missing
            self._prepare(step)
        try:
            self._storage.save(step, named, record)
        except Exception as error:
            self._give_up()
            raise self._cannot_write(step, error) from error
        self._thread = threading.Thread(target=self._finish, args=(step,), name="axcore-checkpoint")
        self._thread.start()
        if not self.cfg.asynchronous:
            self.wait()

    def check(self) -> None:
        """Raises what failed in the background since the last call; costs nothing. For each step of a loop."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first. A save that is under way or failed does not count."""
        try:
            if not self.folder.is_dir():
                return []
            names = [path.name for path in self.folder.iterdir() if path.name.isdecimal()]
            if not inventory.is_local(self.folder):  # there a folder has its final name before it is complete
                names = [name for name in names if (self.folder / name / COMMITTED).exists()]
            return sorted(map(int, names))
        except OSError as error:
            raise AxcoreError(f"cannot list the checkpoints in {self.folder}: {os_reason(error)}") from error

    def latest(self) -> int | None:
        """The newest step that can be restored, or None."""
        return max(self.steps(), default=None)

    def meta(self, step: int | None = None) -> dict[str, Json]:
        """The metadata of a checkpoint (of the latest, by default), without reading an array.

        Raises:
            AxcoreError: there is no such checkpoint, or it cannot be read.
        """
        return self._record(self._chosen(step))["meta"]

    def layout(self, step: int | None = None) -> Layout:
        """Path -> (dtype, shape) of each array of a checkpoint. Raises what `meta` does."""
        return self._record(self._chosen(step))["arrays"]

    def restore(
        self, abstract_state: PyTree, step: int | None = None, *, subset: bool = False, cast: bool = False
    ) -> Restored:
        """Reads a checkpoint: the latest, or that of `step`. Never another one in its place.

        Args:
            abstract_state: the state's structure with a `jax.ShapeDtypeStruct` (or an array) for each array. Its
                `sharding` says where the array goes, whatever mesh it was saved from; without one, to where jax puts
                new arrays.
            step: number of steps done.
            subset: leave out the stored arrays that `abstract_state` does not name (a server needs no optimizer).
            cast: convert floating-point arrays to the floating-point dtype that `abstract_state` asks for.

        Raises:
            AxcoreError: there is no such checkpoint; its arrays differ from `abstract_state` in path, shape or dtype
                (the paths are named); or it is damaged (the next older step is named).
        """
        self.wait()
        step = self._chosen(step)
        wanted = named_leaves(abstract_state)
        with processes.together(f"restore-{step}"):
            record = self._record(step)
            if found := mismatches(record["arrays"], wanted, subset=subset, cast=cast):
                raise AxcoreError(f"checkpoint {self.folder / str(step)} does not fit this state:{listed(found)}")
            self._check_files(step, part=(jax.process_index(), jax.process_count()))
        try:
            arrays = self._storage.restore(step, wanted)
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            raise self._damaged(step, os_reason(error)) from error
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[path] for path in wanted])
        return Restored(step, state, record["data"], record["meta"])

    def delete_after(self, step: int) -> None:
        """Removes the checkpoints after `step`: the run resumes there and comes to those steps again."""
        self.wait()
        with processes.together(f"delete-after-{step}"):
            for later in self.steps() if jax.process_index() == 0 else []:
                if later > step:
                    try:
                        self._storage.delete(later)
                    except OSError as error:
                        raise AxcoreError(
                            f"cannot remove checkpoint {self.folder / str(later)}: {os_reason(error)}"
                        ) from error
        self._storage.reset()
        self._saved_step = None

    def wait(self) -> None:
        """Returns when the save under way, if any, is committed and old checkpoints are removed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def close(self) -> None:
        """Waits, and ends the background threads."""
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
        """Makes the folder ready for a save. With several processes the first one tries to write, since an error inside
        of Orbax would leave the others waiting."""
        if jax.process_index() != 0:
            return
        if any(held >= step for held in self.steps()):  # it would be the first to go, as the oldest
            raise AxcoreError(
                f"cannot save step {step}: {self.folder} has checkpoints of {_joined(self.steps())}; "
                f"resume from the last, or remove those from step {step} on"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._storage.clear()
            if jax.process_count() > 1:
                self._storage.probe(step)
        except OSError as error:
            raise self._cannot_write(step, error) from error

    def _finish(self, step: int) -> None:
        """In the background: waits for the commit."""
        try:
            self._storage.wait()
            self._saved_step = step
        except BaseException as error:
            self._give_up()
            self._failure = self._cannot_write(step, error)
            self._failure.__cause__ = error

    def _give_up(self) -> None:
        """After a failed save."""
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
            raise AxcoreError(f"there is no checkpoint of step {step} in {self.folder}; it has {_joined(steps)}")
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
        except inventory.Damage as damage:
            raise self._damaged(step, str(damage)) from damage
        except OSError as error:
            raise self._damaged(step, os_reason(error)) from error

    def _damaged(self, step: int, what: str) -> AxcoreError:
        older = [other for other in self.steps() if other < step]
        advice = (
            f"to resume from step {older[-1]} instead, move that folder away"
            if older
            else "there is no older checkpoint to resume from"
        )
        return AxcoreError(f"checkpoint {self.folder / str(step)} is damaged ({what}); {advice}")


def _joined(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether it is the memory that failed, of the host or of a device, and not the disk."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED: Out of memory" in str(error)
