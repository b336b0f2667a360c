"""What the trainer asks of an input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from axcore import config
from axcore.train.data.batch import Batch


class ResumableBatches(Protocol):
    """Endless training batches that can be stopped and gone on with."""

    def __next__(self) -> Batch: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def get_state(self) -> bytes:
        """What `set_state` needs to go on from here, in any process."""
        ...

    def set_state(self, state: bytes) -> None: ...

    def close(self) -> None:
        """Stops reading ahead."""
        ...


class Input(config.Configurable):
    """Base of inputs: batches for training and for validation.

    Built as `cfg.build(process_index=..., process_count=...)`; each process makes its own rows of every global batch.
    """

    class Config(config.Config):
        seq_len: int = config.REQUIRED
        """Tokens in a row."""
        batch_size: int = config.REQUIRED
        """Rows of a global batch, over all processes."""
        seed: int | None = None
        """Of the order of training rows. None: the trainer's."""

    @staticmethod
    def batch_spec(cfg: Any) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """(shape, dtype) of each array of a global batch, without reading any data."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        raise NotImplementedError

    @property
    def validation_byte_count(self) -> int:
        """Bytes of the validation text: what its loss is divided by for bits per byte."""
        raise NotImplementedError

    def train_batches(self) -> ResumableBatches:
        """A new iterator from the first batch on."""
        raise NotImplementedError

    def validation_batches(self) -> Iterator[Batch]:
        """All validation batches, finite, in the same order each time, of the shape of training batches."""
        raise NotImplementedError
