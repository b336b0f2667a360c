"""What the processes of one run tell each other outside of jit. With one process, nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

from axcore.config import AxcoreError


def gather_bytes(data: bytes) -> list[bytes]:
    """Every process's bytes, in the order of processes. All must call it."""
    if jax.process_count() == 1:
        return [data]
    from jax.experimental.multihost_utils import process_allgather

    lengths = process_allgather(np.array(len(data))).reshape(-1)
    padded = np.zeros(max(int(lengths.max()), 1), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = process_allgather(padded).reshape(len(lengths), -1)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def of_first(value: int) -> int:
    """The first process's value, on every process. All must call it."""
    if jax.process_count() == 1:
        return value
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return int(broadcast_one_to_all(np.array(value)))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """An AxcoreError that one process meets inside is raised on all, so that none waits for it.

    All must come here. Inside, a process may not ask the others anything.
    """
    failure: AxcoreError | None = None
    try:
        yield
    except AxcoreError as error:
        if jax.process_count() == 1:
            raise
        failure = error
    told = gather_bytes(str(failure or "").encode())
    if failure is not None:
        raise failure
    for number, text in enumerate(told):
        if text:
            raise AxcoreError(f"process {number} of {len(told)} cannot start: {text.decode()}")
