"""Transformations that grain lacks: packing many short rows at once, mixing by tokens, joining streams into batches.
Imported when an input is built, since grain is slow to import."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from axcore.train.data.batch import Batch, Row, make_batch, make_rows
from axcore.train.data.packing import Tokens

State = dict[str, Any]  # Any: the type of states in grain.DatasetIterator
_PACKED_TOGETHER = 2**12
_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # its fractional part, times 2**64


class ConcatThenSplitRows(grain.IterDataset[Row]):
    """Rows from concatenated sequences. grain's own packer runs Python code per row and feature, which is too slow for
    rows of a hundred tokens. This class packs several thousand tokens at a time."""

    def __init__(self, parent: grain.IterDataset[Tokens], seq_len: int):
        super().__init__(parent)
        self._seq_len = seq_len

    def __iter__(self) -> grain.DatasetIterator[Row]:
        return _ConcatThenSplitIterator(iter(self._parent), self._seq_len)


class _ConcatThenSplitIterator(grain.DatasetIterator[Row]):
    """The state is the start of the next row: the parent's position before a sequence and an offset in the sequence."""

    def __init__(self, parent: grain.DatasetIterator[Tokens], seq_len: int):
        super().__init__(parent)
        self._seq_len = seq_len
        self._count = max(1, _PACKED_TOGETHER // seq_len)
        self._restart(parent.get_state(), 0)

    def _restart(self, parent_state: State, offset: int) -> None:
        self._rows: Sequence[Row] | Row = ()
        self._taken = 0
        self._rest: Tokens | None = None  # the part of the last sequence after the rows
        self._skip = offset
        # For each sequence in the rows: its first pair, the parent's position, and the offset in the sequence.
        self._begins, self._sources = [0], [(parent_state, offset)]

    def __next__(self) -> Row:
        if self._taken == len(self._rows):
            self._fill()
        row = self._rows[self._taken]
        self._taken += 1
        return row

    def _fill(self) -> None:
        size = self._count * self._seq_len
        begins, sources, sequences, total = [], [], [], 0
        while total < size:
            if self._rest is not None:
                sequence, source = self._rest, self._position(self._taken * self._seq_len)
                self._rest = None
            else:
                source = self._parent.get_state(), self._skip
                sequence = _after(next(self._parent), self._skip)
                self._skip = 0
            begins.append(total)
            sources.append(source)
            sequences.append(sequence)
            total += len(sequence["inputs"])
        starts = np.zeros(total, bool)
        starts[[begin for begin in begins if begin < total]] = True
        shape = self._count, self._seq_len
        inputs, targets = (np.concatenate([each[name] for each in sequences])[:size] for name in ("inputs", "targets"))
        self._rows = list(make_rows(inputs.reshape(shape), targets.reshape(shape), starts[:size].reshape(shape)))
        self._taken, self._begins, self._sources = 0, begins, sources
        if total > size:
            self._rest = _after(sequences[-1], size - begins[-1])

    def _position(self, pair: int) -> tuple[State, int]:
        index = bisect.bisect_right(self._begins, pair) - 1
        parent_state, offset = self._sources[index]
        return parent_state, offset + pair - self._begins[index]

    def get_state(self) -> State:
        parent_state, offset = self._position(self._taken * self._seq_len)
        return {"parent": copy.copy(parent_state), "offset": offset}

    def set_state(self, state: State) -> None:
        self._parent.set_state(state["parent"])
        self._restart(state["parent"], state["offset"])


def _after(sequence: Tokens, offset: int) -> Tokens:
    return Tokens(inputs=sequence["inputs"][offset:], targets=sequence["targets"][offset:]) if offset else sequence


def first_fit_rows(parent: grain.IterDataset[Tokens], seq_len: int, open_rows: int) -> grain.IterDataset[Row]:
    """Rows that hold whole sequences, by grain's packer."""
    import grain.experimental

    class Cut(grain.experimental.FlatMapTransform):
        def flat_map(self, element: Tokens) -> list[Tokens]:
            """Cuts sequences to at most one row, since the packer rejects longer ones."""
            length = len(element["inputs"])
            return [
                Tokens(inputs=element["inputs"][at : at + seq_len], targets=element["targets"][at : at + seq_len])
                for at in range(0, length, seq_len)
            ]

    packed = grain.experimental.FirstFitPackIterDataset(
        grain.experimental.FlatMapIterDataset(parent, Cut()),
        length_struct={"inputs": seq_len, "targets": seq_len},
        num_packing_bins=open_rows,
    )
    names = "inputs", "targets", "inputs_segment_ids", "inputs_positions"
    return packed.map(lambda row: np.stack([row[name] for name in names]))


class ShuffledRows(grain.IterDataset[Row]):
    """Rows in random order within consecutive windows. grain's own window shuffle takes 0.2 ms per row with a
    window of 256."""

    def __init__(self, parent: grain.IterDataset[Row], *, window: int, seed: int):
        """
        Args:
            parent: the rows, endless.
            window: rows in a window, all in memory.
            seed: below 2**64.
        """
        super().__init__(parent)
        self._window, self._seed = window, seed

    def __iter__(self) -> grain.DatasetIterator[Row]:
        return _ShuffledIterator(iter(self._parent), self._window, self._seed)


class _ShuffledIterator(grain.DatasetIterator[Row]):
    """The state is the parent's position before the window and the number of rows taken from the window."""

    def __init__(self, parent: grain.DatasetIterator[Row], window: int, seed: int):
        super().__init__(parent)
        self._size, self._seed = window, seed
        self._number, self._start = -1, parent.get_state()
        self._rows: list[Row] = []  # the remaining rows of the window, the next one last

    def __next__(self) -> Row:
        if not self._rows:
            self._fill(self._number + 1)
        return self._rows.pop()

    def _fill(self, number: int) -> None:
        self._number, self._start = number, self._parent.get_state()
        rows = [next(self._parent) for _ in range(self._size)]
        # NumPy guarantees the raw output of a bit generator across versions, but not `Generator.permutation`.
        words = np.random.Philox(key=np.array([self._seed, number], np.uint64)).random_raw(self._size)
        self._rows = [rows[index] for index in np.argsort(words, kind="stable")]

    def get_state(self) -> State:
        start = copy.copy(self._start) if self._rows else self._parent.get_state()
        return {"parent": start, "window": self._number, "left": len(self._rows)}

    def set_state(self, state: State) -> None:
        self._parent.set_state(state["parent"])
        self._rows, self._number, self._start = [], state["window"], state["parent"]
        if state["left"]:
            self._fill(self._number)
            del self._rows[state["left"] :]


class MixedRows(grain.IterDataset[Row]):
    """Rows of several datasets in given shares. grain's own mixture visits its datasets in the same order in every
    stream, so all rows of a batch would come from one dataset. This class mixes the datasets within each batch."""

    def __init__(
        self,
        parents: Sequence[grain.IterDataset[Row]],
        shares: Sequence[float],
        *,
        first_row: int,
        rows: int,
        batch_size: int,
    ):
        """
        Args:
            parents: the datasets, endless.
            shares: the share of each, summing to 1.
            first_row: this stream's first row in each batch.
            rows: this stream's rows in each batch.
            batch_size: rows of a batch over all streams.
        """
        super().__init__(parents)
        self._bounds = np.cumsum(shares)[:-1].tolist()
        self._first_row, self._count, self._batch_size = first_row, rows, batch_size

    def __iter__(self) -> grain.DatasetIterator[Row]:
        return _MixedIterator([iter(parent) for parent in self._parents], self._choose)

    def _choose(self, row: int) -> int:
        """The dataset of a row of this stream. Multiples of the golden ratio are evenly spread over [0, 1), so
        consecutive rows of the batches have nearly the requested shares."""
        batch, offset = divmod(row, self._count)
        number = batch * self._batch_size + self._first_row + offset
        return bisect.bisect_right(self._bounds, number * _GOLDEN_RATIO % 2**64 / 2**64)


class _MixedIterator(grain.DatasetIterator[Row]):
    def __init__(self, parents: Sequence[grain.DatasetIterator[Row]], choose: Callable[[int], int]):
        super().__init__(parents)
        self._choose = choose
        self._row = 0

    def __next__(self) -> Row:
        row = next(self._parents[self._choose(self._row)])
        self._row += 1
        return row

    def get_state(self) -> State:
        return {"row": self._row, "parents": [parent.get_state() for parent in self._parents]}

    def set_state(self, state: State) -> None:
        self._row = state["row"]
        for parent, parent_state in zip(self._parents, state["parents"], strict=True):
            parent.set_state(parent_state)


class JoinedBatches(grain.IterDataset[list[Batch]]):
    """Groups of batches whose rows come from several streams. An element is a list of batches, since passing an
    element between threads costs more than making a small batch. The state maps stream numbers to their states."""

    def __init__(self, streams: Mapping[int, grain.IterDataset[Row]], rows: int, group: int):
        """
        Args:
            streams: streams by number, in the order of their rows in a batch.
            rows: rows of each stream per batch.
            group: batches per element.
        """
        super().__init__(list(streams.values()))
        self._numbers, self._count, self._group = [str(number) for number in streams], rows, group

    def __iter__(self) -> grain.DatasetIterator[list[Batch]]:
        return _JoinedIterator([iter(parent) for parent in self._parents], self._numbers, self._count, self._group)


class _JoinedIterator(grain.DatasetIterator[list[Batch]]):
    def __init__(self, parents: Sequence[grain.DatasetIterator[Row]], numbers: list[str], count: int, group: int):
        super().__init__(parents)
        self._numbers, self._count, self._group = numbers, count, group

    def __next__(self) -> list[Batch]:
        count, group = self._count, self._group
        streams = [[next(parent) for _ in range(group * count)] for parent in self._parents]
        batches = []
        for at in range(0, group * count, count):
            rows = [row for stream in streams for row in stream[at : at + count]]
            batches.append(make_batch(np.stack(rows)))
        return batches

    def get_state(self) -> State:
        return {number: parent.get_state() for number, parent in zip(self._numbers, self._parents, strict=True)}

    def set_state(self, state: State) -> None:
        for number, parent in zip(self._numbers, self._parents, strict=True):
            parent.set_state(state[number])
