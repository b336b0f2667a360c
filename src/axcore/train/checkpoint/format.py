"""What a checkpoint format is: how the arrays of a checkpoint lie on disk."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from axcore import config


class CheckpointFormat(config.Configurable):
    """Base of checkpoint formats, for the slot `checkpointer.format`. This is the whole contract:

    ```python
    class Npz(CheckpointFormat):
        def save(self, folder, arrays):
            folder.mkdir()
            np.savez(folder / "arrays.npz", **{path: np.asarray(array) for path, array in arrays.items()})

        def restore(self, folder, wanted):
            with np.load(folder / "arrays.npz") as stored:
                return {path: jax.device_put(stored[path], form.sharding) for path, form in wanted.items()}
    ```

    The checkpointer does the rest: when to save, which checkpoints to keep, the data position and the metadata,
    checksums, and that a checkpoint is there whole or not at all. What a format raises is shown by its first line, for
    an OSError as the operating system says it. After a failed save the object is closed and another one built.

    With several processes each calls every method, with one folder that all of them see. When `wait` returns on the
    first process, the arrays of all must be on disk: the first then commits the checkpoint.
    """

    class Config(config.Config):
        """Fields of the format. Building it touches nothing."""

    def __init__(self, cfg: Any):
        self.config = cfg

    def save(self, folder: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
        """Begins to write. When it returns, the arrays may be donated.

        Args:
            folder: does not exist yet; the folder above it does.
            arrays: path, such as `params.norm.scale` -> jax or numpy array of any dtype (bfloat16, float8), sharded as
                it may be. None is empty or a PRNG key.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Returns when the save under way, if any, is on disk; raises why it failed. Called from another thread."""

    def restore(self, folder: pathlib.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Reads some of what `save` wrote.

        Args:
            folder: what `save` got, with another name above it.
            wanted: path -> shape and dtype, which are as saved, and the sharding to place the array with, which may be
                of another mesh.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of threads and files. Nothing is under way; a later `save` or `restore` may take them up again."""
