"""What the processes of one run tell each other outside of jit. With one process, nothing."""

from __future__ import annotations

import jax
import numpy as np


def gather_bytes(data: bytes) -> list[bytes]:
    """Every process's bytes, in the order of processes. All must call it."""
    if jax.process_count() == 1:
        return [data]
    from jax.experimental.multihost_utils import process_allgather

    lengths = process_allgather(np.array(len(data))).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = process_allgather(padded).reshape(len(lengths), -1)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def of_first(value: int) -> int:
    """The first process's value, on every process. All must call it."""
    if jax.process_count() == 1:
        return value
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return int(broadcast_one_to_all(np.array(value)))
