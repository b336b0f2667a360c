"""The batch: what every input gives the trainer, for training and validation alike."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray


class Batch(TypedDict):
    """A dict of numpy arrays, each `[batch, seq]`. `batch` counts this process's rows only.

    A row is a window of a token stream in which documents follow one another. Padding is 0 in every array.
    """

    inputs: NDArray[np.int32]
    """Token ids that the model reads."""

    targets: NDArray[np.int32]
    """The token that follows each input: what the model predicts there."""

    weights: NDArray[np.float32]
    """1 where the target counts in the loss, 0 where it is padding."""

    segment_ids: NDArray[np.int32]
    """1 for the row's first document, 2 for its second, and so on; 0 for padding."""

    positions: NDArray[np.int32]
    """0, 1, 2, ... from the start of each document. One that began in an earlier row starts again at 0 in
    this one, so positions are below `seq`."""


_DTYPES = {
    "inputs": np.dtype(np.int32),
    "targets": np.dtype(np.int32),
    "weights": np.dtype(np.float32),
    "segment_ids": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
}


def batch_spec(batch_size: int, seq_len: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """(shape, dtype) of each array of a `Batch`: what compiling ahead of time needs to know of the data."""
    return {name: ((batch_size, seq_len), dtype) for name, dtype in _DTYPES.items()}


def unstack(batches: Batch) -> list[Batch]:
    """Arrays `[n, batch, seq]` -> `n` batches, which are views."""
    return [
        Batch(inputs=inputs, targets=targets, weights=weights, segment_ids=segment_ids, positions=positions)
        for inputs, targets, weights, segment_ids, positions in zip(
            batches["inputs"],
            batches["targets"],
            batches["weights"],
            batches["segment_ids"],
            batches["positions"],
            strict=True,
        )
    ]
