"""Orbax's CheckpointManager for one folder, with checksums in each checkpoint and errors shared among processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from axcore.runtime import processes
from axcore.runtime.errors import PeerFailed
from axcore.train.checkpoint import inventory
from axcore.train.checkpoint.inventory import TEMPORARY
from axcore.train.checkpoint.quiet import quiet
from axcore.train.checkpoint.state_layout import ArrayLike
from axcore.train.files import os_reason, sync_folder

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

STATE, RECORD = "state", "record"
"""Names of the two items of a checkpoint: the arrays, and everything else as JSON."""
RECORD_FILE = f"{RECORD}/metadata"
REMOVED = "removed"
"""Folder for checkpoints to delete. Moving a checkpoint there is atomic; deleting its files is not."""
COMMITTED = "commit_success.txt"
CLEARING_ATTEMPTS = 10
TIMEOUT_SECONDS = 3 * 3600
"""Timeout for the writes of one save. Long, since a slow disk is not an error."""


class Storage:
    """Writes and reads the checkpoints below one folder. All processes call `save`, `wait` and `restore`."""

    def __init__(self, folder: epath.Path, keep: int, keep_every: int | None):
        self.folder, self.keep, self.keep_every = folder, keep, keep_every
        self._manager: ocp.CheckpointManager | None = None
        self._saving = _Saving(folder, 0)
        self._quiet = contextlib.ExitStack()

    def save(self, step: int, named: Mapping[str, ArrayLike], record: object) -> None:
        """Starts writing a checkpoint. When it returns, the arrays may be donated. Call `wait` afterwards."""
        self._quiet.close()
        self._quiet.enter_context(quiet())
        import orbax.checkpoint as ocp

        self._saving = _Saving(self.folder, step)
        items = {RECORD: ocp.args.JsonSave(record)}
        if arrays := _stored(named):
            items[STATE] = ocp.args.PyTreeSave(arrays)
        with _plain_errors():
            # Without `force`, Orbax silently skips a step that it does not consider due.
            self._open().save(step, args=ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Waits until the save is committed and old checkpoints are removed. Raises if the save failed."""
        with _plain_errors():
            self._open().wait_until_finished()
        if jax.process_index() == 0:
            if inventory.is_local(self.folder):
                sync_folder(self.folder)
            _remove(self.folder / REMOVED)
        self._quiet.close()

    def restore(self, step: int, wanted: Mapping[str, ArrayLike]) -> dict[str, jax.Array]:
        """Reads arrays in the shapes, dtypes and shardings of `wanted`. Without a sharding, an array goes to jax's
        default device."""
        default = jnp.zeros(()).sharding
        forms = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or default)
            for path, leaf in wanted.items()
        }
        read: Mapping[str, jax.Array] = {}
        if item := _stored(forms):
            with quiet(), _plain_errors():
                import orbax.checkpoint as ocp

                args = ocp.args.PyTreeRestore(
                    item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
                )
                read = self._open().restore(step, args=ocp.args.Composite(**{STATE: args}))[STATE]
        return {
            path: read[_key(path)] if form.size else jax.device_put(np.zeros(form.shape, form.dtype), form.sharding)
            for path, form in forms.items()
        }

    def reset(self) -> None:
        """Discards the in-memory state of a failed save and Orbax's cache of the folder."""
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):  # closing raises the error of the save again
                manager.close()

    def close(self) -> None:
        """Ends Orbax's threads. No save may be in progress. A later call starts the threads again."""
        with quiet():
            self.reset()
        self._quiet.close()

    def clear(self) -> None:
        """Removes leftovers of interrupted saves and deletions where possible. Called on the first process."""
        for _ in range(CLEARING_ATTEMPTS):
            found: list[epath.Path] = []
            with contextlib.suppress(OSError):
                found = [path for path in self.folder.iterdir() if TEMPORARY in path.name or path.name == REMOVED]
            if not found:
                break
            for path in found:
                _remove(path)
            time.sleep(0.05)  # other writes of a failed save may still run and recreate its folder

    def probe(self, step: int) -> None:
        """Raises an OSError if the folder of a save cannot be created. Called on the first process."""
        probe = self.folder / f"{step}{TEMPORARY}"
        probe.mkdir()
        (probe / RECORD).write_text(str(step))
        probe.rmtree()

    def delete(self, step: int) -> None:
        """Removes one checkpoint. Called on the first process."""
        target = self.folder / str(step)
        if inventory.is_local(self.folder):
            (self.folder / REMOVED).mkdir(exist_ok=True)
            target = target.rename(self.folder / REMOVED / str(step))
        else:
            (target / COMMITTED).unlink()
        target.rmtree()
        _remove(self.folder / REMOVED)

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            import orbax.checkpoint as ocp

            policies = [ocp.checkpoint_managers.LatestN(self.keep)]
            if self.keep_every is not None:
                policies.append(ocp.checkpoint_managers.EveryNSteps(self.keep_every))
            options = ocp.CheckpointManagerOptions(
                create=False,
                save_root_metadata=False,
                lightweight_initialize=True,
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
                todelete_subdir=REMOVED,
                # Makes Orbax's barriers use the coordination service, with a timeout.
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    active_processes=set(range(jax.process_count()))
                ),
                async_options=ocp.AsyncOptions(
                    timeout_secs=TIMEOUT_SECONDS,
                    barrier_sync_fn=lambda *, key, timeout_ms: self._saving.meet(key, timeout_ms / 1000),
                    post_finalization_callback=lambda: self._saving.write_inventory(),
                    create_directories_asynchronously=False,  # so that a folder that cannot be written fails in `save`
                ),
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager


class _Saving:
    """A save in progress. The processes exchange checksums and errors at the barriers of Orbax's background threads."""

    def __init__(self, folder: epath.Path, step: int):
        self.name = f"checkpoint-{step}"
        self.folder = folder / (f"{step}{TEMPORARY}" if inventory.is_local(folder) else str(step))
        self._caller = threading.get_ident()
        self._of_peers: dict[str, tuple[int, int]] = {}
        self._failure: str | None = None

    def meet(self, key: str, timeout: float) -> None:
        """Replaces a barrier of Orbax. Raises if another process failed.

        A process that fails skips a barrier, but Orbax has one more barrier at the end of each save, in a `finally`
        block. There the process reports its error to the others, which wait at the barrier that it skipped.
        """
        if jax.process_count() == 1:
            return
        error = None if threading.get_ident() == self._caller else sys.exception()
        if self._failure is None:
            self._failure = self._exchange(key, timeout, error)
        if self._failure is not None and error is None:
            raise PeerFailed(self._failure)

    def write_inventory(self) -> None:
        """Writes the inventory. Called on the first process after all arrays are written and before the commit."""
        inventory.write(self.folder, {**self._of_peers, **inventory.of_process(self.folder, 0)})

    def _exchange(self, key: str, timeout: float, error: BaseException | None) -> str | None:
        news: dict[str, object] = {"key": key, "error": error and os_reason(_os_error(error) or error)}
        rank = jax.process_index()
        try:
            if "async_write_complete" in key and rank != 0:
                news["files"] = inventory.of_process(self.folder, rank)
        except OSError as failed:
            news["error"] = os_reason(failed)
        told = [json.loads(each) for each in processes.gather(self.name, json.dumps(news).encode(), timeout)]
        for number, each in enumerate(told):
            if each["error"]:
                return f"process {number} of {len(told)} failed: {each['error']}"
            self._of_peers |= each.get("files", {})
        if len({each["key"] for each in told}) > 1:
            return f"the processes are at different points of the save: {', '.join(each['key'] for each in told)}"
        return None


def _stored[T: ArrayLike](named: Mapping[str, T]) -> dict[str, T]:
    """The arrays that Orbax can store: those with at least one element."""
    return {_key(path): leaf for path, leaf in named.items() if math.prod(leaf.shape)}


def _key(path: str) -> str:
    """The name under which Orbax stores an array. TensorStore treats `a` and `a/` as the same name."""
    return path.replace("%", "%25").replace("/", "%2F")


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises errors of the operating system as OSError, including those that TensorStore wraps."""
    try:
        yield
    except Exception as error:
        plain = _os_error(error)
        if plain is None or plain is error:
            raise
        raise plain from error


def _os_error(error: BaseException | None) -> OSError | None:
    """The nearest cause with an error number of the operating system."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error
        if code := re.search(r"os_error_code='(\d+)'|OS error (\d+)", str(error)):
            number = int(code[1] or code[2])
            return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


def _remove(folder: epath.Path) -> None:
    with contextlib.suppress(OSError):
        if folder.exists():
            folder.rmtree()
