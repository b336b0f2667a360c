"""Files cut into pieces, which are read on demand."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from jaxtyping import Int64

from axcore.config import AxcoreError
from axcore.train.data.source import Document
from axcore.train.files import os_reason


class Pieces:
    """A random-access data source: the pieces of some files, in order.

    A file of `n` bytes has `n // piece_bytes` pieces, at least one. Piece `j` begins after the first newline at or
    after byte `j * piece_bytes`, so the index requires only sizes and a piece is read in one operation. If the next
    `piece_bytes / 2` bytes have no newline, the cut is at `j * piece_bytes`, moved to the start of a UTF-8 character.
    """

    def __init__(self, folder: Path, names: Sequence[str], sizes: Int64[np.ndarray, " files"], piece_bytes: int):
        """
        Args:
            folder: the root of the names.
            names: paths of the files below `folder`.
            sizes: bytes of each file.
            piece_bytes: the approximate size of a piece.
        """
        self._folder, self._names, self._sizes, self._piece_bytes = folder, names, sizes, piece_bytes
        self._ends = np.cumsum(np.maximum(sizes // piece_bytes, 1))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __repr__(self) -> str:
        return f"{len(self._names)} files in {self._folder}"

    def __getitem__(self, index: SupportsIndex) -> Document:
        """
        Raises:
            AxcoreError: the file can no longer be read, or is shorter than it was.
        """
        index = operator.index(index)
        file = int(np.searchsorted(self._ends, index, side="right"))
        name, size, step = self._names[file], int(self._sizes[file]), self._piece_bytes
        count = max(size // step, 1)
        piece = index - (int(self._ends[file]) - count)
        last = piece == count - 1
        first_byte = piece * step
        end_byte = size if last else first_byte + step + step // 2
        content = self._read(name, first_byte, min(end_byte, size))
        begin = _cut(content, 0, step // 2) if piece else 0
        end = len(content) if last else _cut(content, step, step // 2)
        where = name if count == 1 else f"{name} (bytes {first_byte + begin} to {first_byte + end})"
        return Document(where, content[begin:end], starts=piece == 0, ends=last)

    def _read(self, name: str, begin: int, end: int) -> bytes:
        path = os.path.join(self._folder, name)
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                content = os.pread(descriptor, end - begin, begin)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise AxcoreError(f"cannot read {path}: {os_reason(error)}") from error
        if len(content) < end - begin:
            raise AxcoreError(f"{path} has become shorter since the run started. Restore it, or start a new run.")
        return content


def _cut(content: bytes, at: int, slack: int) -> int:
    """The offset of a cut at or after `at`."""
    newline = content.find(b"\n", at, at + slack)
    if newline >= 0:
        return newline + 1
    while at < len(content) and content[at] & 0b1100_0000 == 0b1000_0000:  # within a UTF-8 character
        at += 1
    return at
