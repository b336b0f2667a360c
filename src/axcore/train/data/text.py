"""Text to batches: the input of a language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axcore import config
from axcore.train.data.base import Input
from axcore.train.data.batch import Batch, batch_spec
from axcore.train.data.iterator import TrainBatches
from axcore.train.data.order import EpochOrder
from axcore.train.data.sources import TextSource
from axcore.train.data.tokenizers import ByteTokenizer, Tokenizer
from axcore.train.data.windows import Windows, fingerprint, token_stream


class TextInput(Input):
    """Batches of text: endless and shuffled for training, finite and always the same for validation.

    Each half of the corpus is one stream of tokens (separator, document, separator, document, ...), held in
    memory once, 2 bytes a token for vocabularies to 65,536, and cut into windows. An epoch of training
    predicts each token once, except the first and an incomplete last window. Documents may cross windows.

    Every process reads the whole corpus and makes its own consecutive rows of each global batch: process 0
    the first `local_batch_size`, and so on. The global batch does not depend on the number of processes.
    """

    class Config(Input.Config):
        """What to read and how to cut it."""

        source: TextSource.Config = config.REQUIRED
        tokenizer: Tokenizer.Config = ByteTokenizer.Config()
        shuffle: bool = True
        """False keeps the order of the stream."""
        prefetch_batches: int = 16
        """Training batches that are made ahead of time; 0 makes each when it is asked for."""
        prefetch_threads: int = 1
        """Threads that make them. More only help where a tokenizer or a window is slow."""

    def __init__(self, cfg: TextInput.Config, *, process_index: int = 0, process_count: int = 1):
        """Reads and encodes the corpus.

        Args:
            cfg: see `Config`.
            process_index: which of the processes this one is.
            process_count: how many share a global batch.

        Raises:
            ConfigError: a size that is not positive, a batch that does not divide among the processes, or
                fewer training windows than one batch; and what the source and the tokenizer raise.
        """
        _check(cfg, process_index, process_count)
        self.cfg = cfg
        self._seed = cfg.seed or 0
        with config.under("tokenizer"):
            self.tokenizer: Tokenizer = cfg.tokenizer.build()
        self.local_batch_size: int = cfg.batch_size // process_count
        self._first_row = process_index * self.local_batch_size
        with config.under("source"):
            source = cfg.source.build()
        corpus = source.read()
        self.skipped: Mapping[str, int] = corpus.skipped
        self.train_byte_count = sum(len(document.content) for document in corpus.train)
        self.validation_bytes = b"".join(document.content for document in corpus.validation)
        self._train = token_stream(corpus.train, self.tokenizer)
        validation = token_stream(corpus.validation, self.tokenizer)
        separator_id = self.tokenizer.separator_id
        self._windows = Windows(self._train, cfg.seq_len, separator_id)
        self._validation_windows = Windows(validation, cfg.seq_len, separator_id, pad_to=cfg.batch_size)
        if len(self._windows) < cfg.batch_size:
            raise config.ConfigError(
                f"TextInput: the training text has {len(self._train)} tokens and makes {len(self._windows)} "
                f"windows of seq_len={cfg.seq_len}, fewer than batch_size={cfg.batch_size}; "
                f"make either smaller, or add text"
            )
        self._order = EpochOrder(len(self._windows), seed=self._seed, shuffle=cfg.shuffle)

    @staticmethod
    def batch_spec(cfg: Any) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        return batch_spec(cfg.batch_size, cfg.seq_len)

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self.tokenizer.vocab_size

    @property
    def validation_byte_count(self) -> int:
        """Bytes of the validation text: what its loss is divided by for bits per byte."""
        return len(self.validation_bytes)

    @property
    def batches_per_epoch(self) -> float:
        """Global batches in which every training window is seen once."""
        return len(self._windows) / self.cfg.batch_size

    def train_batches(self) -> TrainBatches:
        """A new iterator over this process's rows of the endless global batches, from the first batch on."""
        cfg = self.cfg
        return TrainBatches(
            self._make_train,
            batch_tokens=self.local_batch_size * cfg.seq_len,
            threads=cfg.prefetch_threads,
            read_ahead=cfg.prefetch_batches,
            identity={
                "batch_size": cfg.batch_size,
                "seq_len": cfg.seq_len,
                "seed": self._seed,
                "shuffle": cfg.shuffle,
                "text": fingerprint(self._train),
            },
        )

    def validation_batches(self) -> Iterator[Batch]:
        """This process's rows of each global validation batch, in the stream's order.

        Every token but the very first is a target of weight 1 exactly once, separators too: a model pays for
        knowing where documents end. All batches have one shape; padding has weight 0. Processes have equally
        many batches.
        """
        for row in range(self._first_row, len(self._validation_windows), self.cfg.batch_size):
            yield self._validation_windows.batch(np.arange(row, row + self.local_batch_size))

    def _make_train(self, numbers: NDArray[np.int64]) -> Batch:
        """`[n]` numbers of global batches -> arrays `[n, local batch, seq]`."""
        rows = self._first_row + np.arange(self.local_batch_size)
        return self._windows.batch(self._order(numbers[:, None] * self.cfg.batch_size + rows))


def _check(cfg: TextInput.Config, process_index: int, process_count: int) -> None:
    for name, least in {"seq_len": 1, "batch_size": 1, "prefetch_batches": 0, "prefetch_threads": 0}.items():
        if getattr(cfg, name) < least:
            raise config.ConfigError(f"TextInput.{name} must be at least {least}, not {getattr(cfg, name)}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index={process_index} must lie in [0, process_count={process_count})")
    if cfg.batch_size % process_count:
        raise config.ConfigError(
            f"TextInput.batch_size={cfg.batch_size} does not divide among {process_count} processes; "
            f"make it a multiple of {process_count}"
        )
