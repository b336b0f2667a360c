"""Packs the chunks of a step into the rows of calls of the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from axcore.infer.decoding.decoder import Decoder
from axcore.infer.execution.buckets import Buckets, Shape, bucket
from axcore.infer.sequences import Chunk
from axcore.nn import Phase


class Batch(NamedTuple):
    """Rows of one width in a call of the model, padded to a bucket.

    The arrays are new for each call: JAX on CPU may read NumPy memory after the call returns.

    Attributes:
        ids: the new tokens of each row.
        ints: for each row the start, the number of new tokens, the slot, 1 if the first new token is the one that was
            sampled last in this slot, else 0, and the slot of the adapter or -1. A padding row has no new tokens, and a
            slot that is out of range.
        pages: the page table of each row; None if the caches have no pages.
    """

    ids: Int[np.ndarray, "rows width"]
    ints: Int[np.ndarray, "rows 5"]
    pages: Int[np.ndarray, "rows pages_per_row"] | None


class ModelCall(NamedTuple):
    """A call of the model on rows that decode, on parts of prompts, or on both together.

    Attributes:
        decode: the rows that decode. Without pages, row i has slot i, for all slots, so that caches are read in place.
        prefill: the parts of prompts.
        at: the rows whose logits are returned, counted through `decode` and then `prefill`; None: all.
    """

    decode: Batch | None
    prefill: Batch | None = None
    at: Int[np.ndarray, " rows"] | None = None

    @property
    def blocks(self) -> dict[Phase, Batch]:
        """The rows of each phase, if there are any."""
        blocks: dict[Phase, Batch | None] = {"decode": self.decode, "prefill": self.prefill}
        return {phase: rows for phase, rows in blocks.items() if rows is not None}


class Part(NamedTuple):
    """Tokens of a chunk that are a row of a call: all of them, or some of a prompt.

    Attributes:
        chunk: the chunk.
        offset: the number of its tokens before those of the part.
        length: the number of tokens.
    """

    chunk: Chunk
    offset: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the next token of the sequence is sampled after this part."""
        return self.chunk.is_last and self.offset + self.length == self.chunk.count


class Packer:
    """Packs chunks into the rows of calls.

    Args:
        decoder: the model, for the slots and page tables of its rows.
        buckets: the sizes to which calls are padded.
    """

    def __init__(self, decoder: Decoder, buckets: Buckets):
        self._decoder, self._buckets = decoder, buckets

    def call(self, decode: Sequence[Chunk], prompts: Sequence[Chunk]) -> tuple[ModelCall, dict[int, Chunk], int]:
        """One call for all rows that decode and for the first chunks of prompts, as many as fit.

        Returns:
            The call, the chunk of each row of its logits that samples a token, and the number of chunks of prompts.
        """
        if not prompts:
            rows, batch = self.decoding(decode)
            return ModelCall(batch), rows, 0
        number, shape = self._buckets.fit([chunk.count for chunk in prompts], mixed=bool(decode))
        parts = dict(enumerate(itertools.chain.from_iterable(_parts(chunk, shape.width) for chunk in prompts[:number])))
        last = {row: part.chunk for row, part in parts.items() if part.is_last}
        if not decode:
            return ModelCall(None, self.batch(parts, shape)), last, number
        most = self._buckets.rows[-1]
        rows, at = {}, np.zeros(most, np.int32)
        for chunk, found in itertools.chain(((each, None) for each in decode), ((c, r) for r, c in last.items())):
            row = self._row(len(rows), chunk)
            rows[row], at[row] = chunk, row if found is None else most + found
        decoding = {row: _whole(chunk) for row, chunk in rows.items() if at[row] < most}
        pages = max(len(chunk.sequence.pages) for chunk in (*decode, *prompts[:number]))
        prefill = self.batch(parts, shape, pages)
        pages = pages if prefill.pages is None else prefill.pages.shape[1]
        return ModelCall(self.batch(decoding, Shape(most, 1), pages), prefill, at), rows, number

    def decoding(self, decode: Sequence[Chunk], width: int = 1) -> tuple[dict[int, Chunk], Batch]:
        """Chunks of rows that decode, with at most `width - 1` drafts each. Returns the chunk of each row, and the
        rows."""
        rows = {self._row(row, chunk): chunk for row, chunk in enumerate(decode)}
        shape = Shape(bucket(self._buckets.rows, len(rows)), width)
        return rows, self.batch({row: _whole(chunk) for row, chunk in rows.items()}, shape)

    def alone(self, chunk: Chunk) -> Batch:
        """A chunk of a prompt as the only row of a call."""
        return self.batch({0: _whole(chunk)}, Shape(1, bucket(self._buckets.widths, chunk.count)))

    def batch(self, rows: Mapping[int, Part], shape: Shape, pages: int = 1) -> Batch:
        """Some rows of a call of this shape, and padding in the others. The page tables have the size of the smallest
        bucket of at least `pages` that holds all rows."""
        ids, ints, table = np.zeros(shape, np.int32), np.zeros((shape.rows, 5), np.int32), None
        ints[:, 2:] = self._decoder.batch_size, 0, -1  # a slot that is out of range, and no adapter
        if (paging := self._decoder.paging) is not None:
            longest = max((len(part.chunk.sequence.pages) for part in rows.values()), default=0)
            pages = bucket(self._buckets.pages, max(pages, longest, paging.pages_for(shape.width)))
            table = np.full((shape.rows, pages), paging.num_pages, np.int32)  # out of range
        for row, (chunk, offset, length) in rows.items():
            tokens, owned = chunk.ids[offset : offset + length], chunk.sequence.pages
            ids[row, : len(tokens)] = tokens
            adapter = -1 if chunk.sequence.adapter is None else chunk.sequence.adapter.slot
            ints[row] = chunk.start + offset, length, slot_of(chunk), int(not chunk.ids), adapter
            if table is not None:
                table[row, : len(owned)] = owned
        return Batch(ids, ints, table)

    def _row(self, row: int, chunk: Chunk) -> int:
        """The row of a chunk that decodes: its slot without pages; see `ModelCall.decode`."""
        return slot_of(chunk) if self._decoder.paging is None else row


def slot_of(chunk: Chunk) -> int:
    """The slot of the sequence of a chunk that is about to be computed."""
    assert chunk.sequence.slot is not None
    return chunk.sequence.slot


def _whole(chunk: Chunk) -> Part:
    return Part(chunk, 0, chunk.count)


def _parts(chunk: Chunk, width: int) -> Iterator[Part]:
    """The rows of at most `width` tokens of a chunk."""
    return (Part(chunk, offset, min(width, chunk.count - offset)) for offset in range(0, chunk.count, width))
