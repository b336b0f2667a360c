"""The endless iterator of training batches, read ahead by grain and resumed exactly."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from axcore.config import AxcoreError
from axcore.train.data.batch import Batch
from axcore.train.files import Json

if TYPE_CHECKING:
    import grain


class TrainBatches(Iterator[Batch]):
    """This process's rows of the global batches. Not thread-safe.

    The state of a stream is its position before the current group of batches and the number of batches taken from the
    group. Batches that were read ahead do not count.
    """

    def __init__(self, groups: grain.IterDataset[list[Batch]], *, groups_ahead: int):
        """
        Args:
            groups: a dataset of lists of batches. Its state maps each stream to a position.
            groups_ahead: number of groups to prepare ahead; 0 makes them on demand.
        """
        import grain.experimental

        if groups_ahead:
            groups = grain.experimental.ThreadPrefetchIterDataset(groups, prefetch_buffer_size=groups_ahead)
        self._open = [iter(groups)]
        self._finalizer = weakref.finalize(self, _close, self._open)  # also at exit, before grain's modules are gone
        self._begin(self._groups.get_state())
        self._groups.start_prefetch()

    @property
    def _groups(self) -> grain.DatasetIterator[list[Batch]]:
        if not self._open:
            raise ValueError("the iterator of training batches is closed")
        return self._open[0]

    def _begin(self, positions: Mapping[str, Json]) -> None:
        self._positions, self._taken = dict(positions), 0
        self._ready: deque[Batch] = deque()

    def __next__(self) -> Batch:
        if not self._ready:
            self._begin(self._groups.get_state())
            self._ready.extend(next(self._groups))
        self._taken += 1
        return self._ready.popleft()

    def get_state(self) -> dict[str, Json]:
        """See `ResumableBatches.get_state`."""
        return {number: {"position": each, "batches": self._taken} for number, each in self._positions.items()}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """See `ResumableBatches.set_state`. Drops batches that were read ahead.

        Raises:
            AxcoreError: `state` does not have the form that `get_state` returns, or lacks a stream of this process.
        """
        positions: dict[str, Json] = {}
        taken: set[int] = set()
        for number in self._positions:
            match state.get(number):
                case {"position": position, "batches": int(batches)} if batches >= 0:
                    positions[number] = position
                    taken.add(batches)
                case other:
                    raise AxcoreError(f"the state of the input must have a position for stream {number}, got {other!r}")
        if len(taken) != 1:
            raise AxcoreError(
                f"all streams in the state of the input must have the same number of batches, got {sorted(taken)}"
            )
        try:
            self._groups.set_state(positions)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise AxcoreError(f"the state of the input does not fit its streams: {error!r}") from error
        self._begin(positions)
        for _ in range(taken.pop()):
            next(self)

    def close(self) -> None:
        """Stops the threads. The iterator cannot be used afterwards. Further calls do nothing."""
        self._finalizer()


def _close(groups: list[grain.DatasetIterator[list[Batch]]]) -> None:
    groups.pop().close()
