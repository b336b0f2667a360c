"""One token stream, cut into windows that predict each of its tokens once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from axcore.config import AxcoreError
from axcore.train.data.batch import Batch
from axcore.train.data.sources import Document
from axcore.train.data.tokenizers import Tokenizer


def token_stream(documents: Iterable[Document], tokenizer: Tokenizer) -> NDArray[np.integer]:
    """`[tokens]`: separator, document, separator, document, ...; uint16 if the vocabulary fits, else int32.

    Raises:
        AxcoreError: the tokenizer gave an id outside its vocabulary, or the separator.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    separator = np.array([tokenizer.separator_id], dtype)
    pieces = []
    for document in documents:
        ids = tokenizer.encode(document.content)
        if ids.size and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
            raise AxcoreError(
                f"{type(tokenizer).__name__} encodes {document.name} with ids from {ids.min()} "
                f"to {ids.max()}, but its vocab_size is {tokenizer.vocab_size}"
            )
        if (ids == tokenizer.separator_id).any():
            raise AxcoreError(f"{type(tokenizer).__name__} encodes {document.name} with its own separator inside")
        pieces += [separator, ids.astype(dtype)]
    return np.concatenate(pieces)


class Windows:
    """Views of a stream: window `i` reads tokens `[i*S, i*S + S)`, and predicts the token after each.

    So each token but the first is the target of exactly one window. The last window, when it is not full, is
    dropped, or padded if `pad_to` asks for it.
    """

    def __init__(self, stream: NDArray[np.integer], seq_len: int, separator_id: int, pad_to: int | None = None):
        """
        Args:
            stream: `[tokens]`.
            seq_len: `S`, the tokens that a window reads.
            separator_id: the token that starts a document.
            pad_to: pad the stream until the number of windows is a multiple of this.
        """
        self._num_targets = len(stream) - 1
        self._padded = pad_to is not None
        self._separator_id = separator_id
        self._offsets = np.arange(seq_len, dtype=np.int32)
        if pad_to is not None:
            count = -(-self._num_targets // (seq_len * pad_to)) * pad_to
            stream = np.concatenate([stream, np.zeros(count * seq_len + 1 - len(stream), stream.dtype)])
        if len(stream) > seq_len:
            self._windows = np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len]
        else:
            self._windows = np.zeros((0, seq_len + 1), stream.dtype)

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, rows: NDArray[np.integer]) -> Batch:
        """The windows with these numbers: new arrays `[*rows.shape, seq]`, which the caller may change."""
        tokens = self._windows[rows]
        inputs = tokens[..., :-1].astype(np.int32)
        targets = tokens[..., 1:].astype(np.int32)
        starts = inputs == self._separator_id
        segment_ids = np.cumsum(starts, axis=-1, dtype=np.int32)
        segment_ids += ~starts[..., :1]  # a row that begins within a document begins segment 1 all the same
        latest_start = np.maximum.accumulate(np.where(starts, self._offsets, np.int32(0)), axis=-1)
        batch = Batch(
            inputs=inputs,
            targets=targets,
            weights=np.ones(inputs.shape, np.float32),
            segment_ids=segment_ids,
            positions=self._offsets - latest_start,
        )
        if self._padded:
            real = rows[..., None] * len(self._offsets) + self._offsets < self._num_targets
            for values in (inputs, targets, batch["weights"], segment_ids, batch["positions"]):
                values *= real
        return batch


def fingerprint(stream: NDArray[np.integer]) -> str:
    """A digest of the tokens; two streams that differ anywhere have different ones."""
    return hashlib.sha256(stream).hexdigest()
