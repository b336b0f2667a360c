"""The interface of inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from axcore import config
from axcore.train.data.batch import Batch
from axcore.train.files import Json


class ResumableBatches(Protocol):
    """Endless training batches whose position can be saved and restored."""

    def __next__(self) -> Batch: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def get_state(self) -> dict[str, Json]:
        """The position of each stream of this process, by stream number.

        The union over all processes is the global state, which does not depend on the number of processes.
        """
        ...

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Continues from a global state. Each process uses the entries of its own streams."""
        ...

    def close(self) -> None:
        """Stops reading ahead."""
        ...


class Input(config.Configurable):
    """Base class of inputs: batches for training and for validation.

    Build it with `cfg.build(process_index=..., process_count=...)`. Each process makes its own rows of every global
    batch.
    """

    class Config(config.Config):
        seq_len: config.PositiveInt = config.REQUIRED
        """Tokens in a row."""
        batch_size: config.PositiveInt = config.REQUIRED
        """Rows of a global batch, over all processes."""
        seed: config.Seed | None = None
        """Determines the order of training rows. None uses the trainer's seed."""

    @staticmethod
    def batch_spec(cfg: Config) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
        """(shape, dtype) of each array of a global batch, without reading any data."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """All token ids are below this."""
        raise NotImplementedError

    @property
    def validation_byte_count(self) -> int:
        """Number of bytes of the validation text, the divisor of bits per byte."""
        raise NotImplementedError

    def validation_bytes(self) -> Iterator[bytes]:
        """The validation text in chunks, in order."""
        raise NotImplementedError

    def train_batches(self) -> ResumableBatches:
        """A new iterator that starts at the first batch."""
        raise NotImplementedError

    def validation_batches(self) -> Iterator[Batch]:
        """A finite iterator over all validation batches, always in the same order, in the shape of training batches."""
        raise NotImplementedError

    def identity(self) -> dict[str, Json]:
        """Everything that determines the sequence of batches and the validation text, equal in all processes.

        A state of `train_batches` is valid only for an input of the same identity.
        """
        raise NotImplementedError


def check_identity(saved: Mapping[str, Json], current: Mapping[str, Json]) -> None:
    """Compares the identity stored in a checkpoint to that of the input of the resumed run.

    Raises:
        AxcoreError: lists the entries that differ.
    """
    names = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    if names:
        changes = ", ".join(f"{name} was {saved.get(name)!r}, is {current.get(name)!r}" for name in names)
        raise config.AxcoreError(
            f"input: the data differs from that of the checkpoint ({changes}). Restore the data, or start a new run "
            f"from the weights of this run: --use run-weights:folder=FOLDER"
        )
