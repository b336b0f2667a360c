"""Streams of rows, from which batches are made."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

from axcore.config import AxcoreError, ConfigError
from axcore.train.data.batch import Row
from axcore.train.data.packing import Packing, Tokens
from axcore.train.data.source import Document, Source, Split
from axcore.train.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    import grain

ORDER_VERSION = 1
"""Version of the order of rows. Increase it when the same config, text and seed give different batches."""

_WINDOW_TOKENS = 2**18
_WINDOWS_IN_EPOCH = 16  # approximate minimum


def encode(tokenizer: Tokenizer, document: Document) -> Int32[np.ndarray, " tokens"]:
    """The token ids of a document. A separator precedes the first piece of a text.

    Raises:
        AxcoreError: the tokenizer raised, or returned the separator or an id outside of its vocabulary. The message
            names the document.
    """
    name = type(tokenizer).__name__
    if not isinstance(document.content, bytes):
        raise AxcoreError(f"{document.name}: Document.content must be bytes, not {type(document.content).__name__}")
    try:
        ids = np.asarray(tokenizer.encode(document.content))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise AxcoreError(
            f"{name} cannot encode {document.name}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        ) from error
    if ids.size and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
        raise AxcoreError(
            f"{name} encodes {document.name} to ids from {ids.min()} to {ids.max()}, but its vocab_size is "
            f"{tokenizer.vocab_size}"
        )
    if (ids == tokenizer.separator_id).any():
        raise AxcoreError(
            f"{name} encodes {document.name} to ids that include its separator_id={tokenizer.separator_id}"
        )
    separator = [tokenizer.separator_id] if document.starts else []
    return np.concatenate([np.array(separator, np.int32), ids.astype(np.int32)])


def training_pairs(tokenizer: Tokenizer, document: Document) -> Tokens:
    """Pairs of consecutive tokens, from the separator before a text to the separator after it."""
    tokens = encode(tokenizer, document)
    if document.ends:
        tokens = np.concatenate([tokens, np.array([tokenizer.separator_id], np.int32)])
    return Tokens(inputs=tokens[:-1], targets=tokens[1:])


def derived_seed(seed: int, *names: object) -> int:
    """A seed below 2**32 for the purpose that `names` identify."""
    return int.from_bytes(hashlib.sha256(repr((seed, *names)).encode()).digest()[:4], "big")


class Streams:
    """Builds the streams of an input.

    Stream `k` of `count` reads every `count`-th document of an endless sequence, starting at the `k`-th. Each epoch of
    the sequence contains each document once, in a new order. Together, the streams read each document once per epoch.
    They do not depend on the number of processes.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        packing: Packing,
        *,
        count: int,
        seq_len: int,
        batch_size: int,
        piece_bytes: int,
        seed: int,
        shuffle: bool,
        threads: int,
    ):
        """See `TextInput.Config`.

        Args:
            source: the documents.
            tokenizer: encodes them.
            packing: packs them into rows.
            count: the number of streams.
            seq_len: tokens in a row.
            batch_size: rows of a global batch.
            piece_bytes: see `Source.documents`.
            seed: seed of the orders.
            shuffle: False keeps the order of the source.
            threads: threads per stream that read and encode ahead.
        """
        import grain  # takes a second

        self._parts: Mapping[str, tuple[float, Source]] = source.parts()
        self._documents = {name: part.documents(Split.TRAIN, piece_bytes) for name, (_, part) in self._parts.items()}
        for documents in self._documents.values():
            if not isinstance(documents, grain.MapDataset):
                raise ConfigError(
                    f"documents() must return a grain.MapDataset of Document, not {type(documents).__name__}. "
                    f"grain.MapDataset.source(sequence) makes one from any sequence."
                )
        self._tokenizer, self._packing, self._threads = tokenizer, packing, threads
        self._count, self._seq_len, self._batch_size = count, seq_len, batch_size
        self._seed, self._shuffle, self._piece_bytes = seed, shuffle, piece_bytes

    def rows(self, number: int) -> grain.IterDataset[Row]:
        """The endless rows of a stream."""
        from axcore.train.data.rows import MixedRows

        parts = [self._rows_of_part(name, number) for name in self._parts]
        if len(parts) == 1:
            return parts[0]
        shares = [share for share, _ in self._parts.values()]
        rows = self._batch_size // self._count
        return MixedRows(parts, shares, first_row=number * rows, rows=rows, batch_size=self._batch_size)

    def _rows_of_part(self, name: str, number: int) -> grain.IterDataset[Row]:
        import grain

        from axcore.train.data.order import ShuffledDocuments
        from axcore.train.data.rows import ShuffledRows

        documents = self._documents[name]
        if self._shuffle:
            documents = ShuffledDocuments(documents, derived_seed(self._seed, "documents", name))
        documents = documents.repeat()[number :: self._count]
        sequences = documents.map(lambda document: training_pairs(self._tokenizer, document))
        options = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=2 * self._threads)
        rows = self._packing.pack(sequences.to_iter_dataset(options), self._seq_len)
        window = min(_WINDOW_TOKENS, len(self._documents[name]) * self._piece_bytes // _WINDOWS_IN_EPOCH)
        window //= self._count * self._seq_len
        if self._shuffle and window > 1:
            seed = derived_seed(self._seed, "rows", name, number)
            rows = ShuffledRows(rows, window=window, seed=seed)
        return rows
