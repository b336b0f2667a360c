"""The text input of a language model."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator

import numpy as np

from axcore import config
from axcore.train.data.base import Input
from axcore.train.data.batch import Batch, batch_spec
from axcore.train.data.iterator import TrainBatches
from axcore.train.data.packing import ConcatThenSplit, Packing
from axcore.train.data.source import Document, LocatedError, Source, Split, located
from axcore.train.data.streams import ORDER_VERSION, Streams, encode, training_pairs
from axcore.train.data.tokenizers import ByteTokenizer, Tokenizer
from axcore.train.data.validation import validation_batches
from axcore.train.files import Json

_MOST_STREAMS = 64
_TOKENS_IN_GROUP = 2**16
_ENCODED_SAMPLE = 8
_ROWS_IN_PIECE = 8


class TextInput(Input):
    """Batches of text: endless and shuffled for training, finite and fixed for validation.

    Training reads a fixed number of streams, which are divided among the processes. Each stream provides
    `batch_size / streams` consecutive rows of every global batch. The global batch does not depend on the number of
    processes, and each document is read once per epoch. Memory does not grow with the text.
    """

    class Config(Input.Config):
        """The text to read and the packing into rows."""

        layout_fields = ("prefetch_batches", "read_threads")
        source: Source.Config = config.REQUIRED
        tokenizer: Tokenizer.Config = ByteTokenizer.Config()
        packing: Packing.Config = ConcatThenSplit.Config()
        """Packing of training documents. Validation always uses concat-then-split."""
        shuffle: bool = True
        """False keeps the order of the source."""
        streams: config.PositiveInt | None = None
        """Number of streams of training text. It must divide `batch_size` and be a multiple of the number of processes.
        The order of rows depends on it. None: the largest divisor of `batch_size` up to 64."""
        piece_bytes: config.PositiveInt | None = None
        """Approximate size of the pieces that long documents are cut into. Segments do not cross the end of a piece.
        Shorter pieces mix the text better, longer ones break fewer rows. None: the text of about eight rows."""
        prefetch_batches: config.NonNegativeInt = 16
        """Number of training batches to prepare ahead; 0 makes them on demand."""
        read_threads: config.NonNegativeInt = 0
        """Threads per stream that read and encode ahead, for slow storage or a slow tokenizer."""

    def __init__(self, cfg: TextInput.Config, *, process_index: int = 0, process_count: int = 1):
        """Builds the index of the source.

        Args:
            cfg: see `Config`.
            process_index: index of this process's part of the rows of each batch.
            process_count: number of parts. Processes whose devices hold the same rows read the same part.

        Raises:
            ConfigError: a number is out of range, the streams cannot be split among the processes, or the training text
                is shorter than one batch. Errors of the source and the tokenizer are also raised.
        """
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index={process_index} must lie in [0, process_count={process_count})")
        streams = _check(cfg, process_count)
        self.config = cfg
        self.local_batch_size: int = cfg.batch_size // process_count
        local_streams = streams // process_count
        self._local_streams = range(process_index * local_streams, (process_index + 1) * local_streams)
        self._rows = slice(process_index * self.local_batch_size, (process_index + 1) * self.local_batch_size)
        with located("input.tokenizer"):
            self.tokenizer: Tokenizer = cfg.tokenizer.build()
        self._piece_bytes = cfg.piece_bytes or max(
            64, round(_ROWS_IN_PIECE * cfg.seq_len * self.tokenizer.bytes_per_token)
        )
        with located("input.packing"):
            packing = cfg.packing.build()
        with located("input.source"):
            self.source: Source = cfg.source.build()
            self._streams = Streams(
                cfg, self.source, self.tokenizer, packing, count=streams, piece_bytes=self._piece_bytes
            )
            self._check_length()
        self._stream_count = streams
        if process_index == 0:
            _report_left_out(self.source)

    @staticmethod
    def batch_spec(cfg: Input.Config) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
        return batch_spec(cfg.batch_size, cfg.seq_len)

    @property
    def vocab_size(self) -> int:
        """All token ids are below this."""
        return self.tokenizer.vocab_size

    @property
    def validation_byte_count(self) -> int:
        """Number of bytes of the validation text, the divisor of bits per byte."""
        return self._validation_text[0]

    def validation_bytes(self) -> Iterator[bytes]:
        """The validation text in chunks, in order."""
        return (document.content for document in self._documents(Split.VALIDATION))

    def train_batches(self) -> TrainBatches:
        """A new iterator over this process's rows of the endless global batches, from the first batch on."""
        from axcore.train.data.rows import JoinedBatches

        cfg, ahead = self.config, self.config.prefetch_batches
        group = max(1, min(_TOKENS_IN_GROUP // (self.local_batch_size * cfg.seq_len), ahead))
        streams = {number: self._streams.rows(number) for number in self._local_streams}
        groups = JoinedBatches(streams, cfg.batch_size // self._stream_count, group)
        return TrainBatches(groups, groups_ahead=-(-ahead // group))

    def validation_batches(self) -> Iterator[Batch]:
        """This process's rows of each global validation batch, in the order of the source.

        Every token except the very first is a target of weight 1 exactly once, including separators, so the loss
        includes predicting where documents end. All batches have one shape, and padding has weight 0. All processes
        have the same number of batches.
        """
        return validation_batches(
            self._documents(Split.VALIDATION),
            self.tokenizer,
            seq_len=self.config.seq_len,
            batch_size=self.config.batch_size,
            rows=self._rows,
        )

    def identity(self) -> dict[str, Json]:
        """See `Input.identity`."""
        cfg = self.config
        tokens = hashlib.sha256()
        for document in _first(self._documents(Split.TRAIN), _ENCODED_SAMPLE):
            tokens.update(encode(self.tokenizer, document).tobytes())
        return {
            "batch_size": cfg.batch_size,
            "seq_len": cfg.seq_len,
            "seed": cfg.seed or 0,
            "shuffle": cfg.shuffle,
            "streams": self._stream_count,
            "piece_bytes": self._piece_bytes,
            "packing": cfg.packing.text(),
            "tokenizer": tokens.hexdigest(),
            "weights": {name: share for name, (share, _) in self.source.parts().items()},
            "training_text": self.source.fingerprint(self._piece_bytes),
            "validation_text": self._validation_text[1],
            "order": ORDER_VERSION,
        }

    @functools.cached_property
    def _validation_text(self) -> tuple[int, str]:
        """The number of bytes and a digest."""
        size, digest = 0, hashlib.sha256()
        for document in self._documents(Split.VALIDATION):
            size += len(document.content)
            digest.update(b"%d:" % document.starts + document.content)
        return size, digest.hexdigest()

    def _documents(self, split: Split) -> Iterator[Document]:
        documents = self.source.documents(split, self._piece_bytes)
        for index in range(len(documents)):
            if (document := documents[index]) is not None:  # grain's filter leaves None in place of dropped elements
                yield document

    def _check_length(self) -> None:
        """Raises if the text is too short for one batch. Reads at most that much text."""
        needed, found = self.config.batch_size * self.config.seq_len, 0
        for document in self._documents(Split.TRAIN):
            found += len(training_pairs(self.tokenizer, document)["inputs"])
            if found >= needed:
                return
        raise config.ConfigError(
            f"the training text has {found} tokens, fewer than one batch of batch_size={self.config.batch_size} rows "
            f"of seq_len={self.config.seq_len} tokens. Reduce either, or add text."
        )


def _first(documents: Iterator[Document], count: int) -> Iterator[Document]:
    return (document for document, _ in zip(documents, range(count), strict=False))


def _report_left_out(source: Source) -> None:
    for name, (_, part) in source.parts().items():
        if left_out := part.left_out():
            path = f"input.source.sources.{name.replace('.', '.sources.')}" if name else "input.source"
            reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            print(f"{path}: left out {sum(left_out.values())} texts: {reasons}", file=sys.stderr)


def _check(cfg: TextInput.Config, process_count: int) -> int:
    """The number of streams.

    Raises:
        LocatedError: a number is out of range or does not divide another.
    """

    def refuse(problem: str) -> LocatedError:
        return LocatedError("input", problem)

    batch_size = cfg.batch_size
    streams = cfg.streams or max(n for n in range(1, min(batch_size, _MOST_STREAMS) + 1) if batch_size % n == 0)
    if batch_size % streams:
        raise refuse(
            f"streams={streams} is not a divisor of batch_size={batch_size}. Set streams to a divisor or None."
        )
    if batch_size % process_count:
        raise refuse(
            f"batch_size={batch_size} cannot be split evenly among {process_count} processes. Make it a multiple of "
            f"{process_count}."
        )
    if streams % process_count:
        raise refuse(
            f"streams={streams} cannot be split evenly among {process_count} processes. Set streams to a divisor of "
            f"batch_size={batch_size} that is a multiple of {process_count}."
        )
    return streams
