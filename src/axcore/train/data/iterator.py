"""The endless iterator of training batches, read ahead by grain and resumed exactly."""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axcore.config import AxcoreError
from axcore.train.data.batch import Batch, unstack

_TOKENS_PER_READ = 2**16
_ENDLESS = 2**42


class TrainBatches(Iterator[Batch]):
    """Batches 0, 1, 2, ... for ever.

    The state is the number of batches taken; what was read ahead does not count. It is the same in every
    process, and may be restored under another number of processes. Not for several threads at once.
    """

    def __init__(
        self,
        make: Callable[[NDArray[np.int64]], Batch],
        *,
        batch_tokens: int,
        threads: int,
        read_ahead: int,
        identity: Mapping[str, Any],
    ):
        """
        Args:
            make: `[n]` batch numbers -> arrays `[n, batch, seq]`; called in grain's threads.
            batch_tokens: tokens in a batch of this process.
            threads: that make batches; 0 makes them in the caller's.
            read_ahead: batches to hold ready; 0 makes them when asked.
            identity: JSON values that the sequence of batches depends on; a state fits only equal ones.
        """
        self._make = make
        self._threads = threads if read_ahead else 0
        # A hand-over between threads costs more than a small batch, so small ones are made several at a time.
        self._group = max(1, min(_TOKENS_PER_READ // batch_tokens, read_ahead))
        self._groups_ahead = -(-read_ahead // self._group)
        self._identity = dict(identity)
        self._groups: Any = None
        self._start(0)

    def __next__(self) -> Batch:
        if not self._ready:
            self._ready.extend(next(self._groups))
        batch = self._ready.popleft()
        self._next_batch += 1
        return batch

    def get_state(self) -> bytes:
        """What `set_state` needs, of an iterator over the same data in any process, to go on from here."""
        return json.dumps({"next_batch": self._next_batch, **self._identity}).encode()

    def set_state(self, state: bytes) -> None:
        """Goes to where `get_state` was called. What was read ahead is dropped.

        Raises:
            AxcoreError: `state` is no such state, or is of other data, another seed or another batch.
        """
        try:
            found = json.loads(state)
            next_batch = operator.index(found.pop("next_batch"))
            if next_batch < 0:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise AxcoreError(f"{state[:80]!r} is not a state that TrainBatches.get_state gave") from None
        was, now = found, self._identity
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        if names:
            changes = ", ".join(f"{name} was {was.get(name)!r}, is {now.get(name)!r}" for name in names)
            raise AxcoreError(
                f"the input differs from the one of the saved state ({changes}), so it cannot go on where "
                f"that stopped; give it what it had, or start the input afresh"
            )
        self._start(next_batch)

    def close(self) -> None:
        """Stops the threads. The iterator cannot be used after; calling this again does nothing."""
        if self._groups is not None:
            self._groups.close()

    def _start(self, next_batch: int) -> None:
        import grain  # slow to import, and a config's module should not be

        self.close()
        group = self._group
        make = self._make
        first, offset = divmod(next_batch, group)

        def read(index: int) -> list[Batch]:
            return unstack(make(np.arange(index * group, (index + 1) * group)))

        options = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=self._groups_ahead)
        groups = grain.MapDataset.range(first, _ENDLESS).map(read)
        self._groups = iter(groups.to_iter_dataset(options))
        self._next_batch = next_batch
        self._ready: deque[Batch] = deque()
        if self._threads:
            self._groups.start_prefetch()
        if offset:
            self._ready.extend(next(self._groups)[offset:])
