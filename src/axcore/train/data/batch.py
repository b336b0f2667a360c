"""The batch format of all inputs, for training and validation."""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32


class Batch(TypedDict):
    """A dict of numpy arrays, each `[batch, seq]`. `batch` counts this process's rows only.

    A row holds segments of documents, one after another. Padding is 0 in every array.
    """

    inputs: Int32[np.ndarray, "batch seq"]
    """Token ids that the model reads."""

    targets: Int32[np.ndarray, "batch seq"]
    """The token that follows each input, which the model predicts."""

    weights: Float32[np.ndarray, "batch seq"]
    """1 where the target counts in the loss, 0 where it is padding."""

    segment_ids: Int32[np.ndarray, "batch seq"]
    """1 for the row's first segment, 2 for its second, and so on; 0 for padding."""

    positions: Int32[np.ndarray, "batch seq"]
    """0, 1, 2, ... from the start of each segment, so positions are below `seq`."""


_DTYPES = {
    "inputs": np.dtype(np.int32),
    "targets": np.dtype(np.int32),
    "weights": np.dtype(np.float32),
    "segment_ids": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
}


def batch_spec(batch_size: int, seq_len: int) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
    """(shape, dtype) of each array of a `Batch`, for ahead-of-time compilation."""
    return {name: ((batch_size, seq_len), dtype) for name, dtype in _DTYPES.items()}


Row = Int32[np.ndarray, "4 seq"]
"""One row of a batch: inputs, targets, segment ids and positions. Entries with segment id 0 are padding."""


def make_rows(
    inputs: Int[np.ndarray, "rows seq"], targets: Int[np.ndarray, "rows seq"], starts: Bool[np.ndarray, "rows seq"]
) -> Int32[np.ndarray, "rows 4 seq"]:
    """Makes rows from pairs of an input and a target.

    Args:
        inputs: token ids.
        targets: the token that follows each.
        starts: where segments begin. The start of each row also begins a segment.
    """
    seq = inputs.shape[1]
    offsets = np.arange(seq, dtype=np.int32)
    starts = starts | (offsets == 0)
    rows = np.empty((len(inputs), 4, seq), np.int32)
    rows[:, 0] = inputs
    rows[:, 1] = targets
    np.cumsum(starts, axis=1, dtype=np.int32, out=rows[:, 2])
    np.subtract(offsets, np.maximum.accumulate(np.where(starts, offsets, np.int32(0)), axis=1), out=rows[:, 3])
    return rows


def make_batch(rows: Int32[np.ndarray, "batch 4 seq"]) -> Batch:
    """Makes a batch of new arrays, which the caller may modify."""
    inputs, targets, segment_ids, positions = (np.ascontiguousarray(rows[:, i]) for i in range(4))
    return Batch(
        inputs=inputs,
        targets=targets,
        weights=(segment_ids > 0).astype(np.float32),
        segment_ids=segment_ids,
        positions=positions,
    )
