"""Packing token sequences of documents into rows."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from jaxtyping import Int32

from axcore import config

if TYPE_CHECKING:
    import grain

    from axcore.train.data.batch import Row


class Tokens(TypedDict):
    """A document, or a piece of one, as pairs of a token and the next token."""

    inputs: Int32[np.ndarray, " tokens"]
    targets: Int32[np.ndarray, " tokens"]


class Packing(config.Configurable, abc.ABC):
    """Base class of packings, which turn the token sequences of one stream into rows."""

    class Config(config.Config):
        """No common options."""

    @abc.abstractmethod
    def pack(self, sequences: grain.IterDataset[Tokens], seq_len: int) -> grain.IterDataset[Row]:
        """Packs sequences into rows of `seq_len` pairs. A pair stays within its segment. Padding has segment id 0.

        Args:
            sequences: an endless dataset. Sequences have any length, and each starts a new segment.
            seq_len: pairs in a row.
        """


class ConcatThenSplit(Packing):
    """Concatenates the sequences and splits the result into rows, without padding. A sequence may span rows."""

    class Config(Packing.Config):
        """No options."""

    def __init__(self, cfg: ConcatThenSplit.Config):
        self.config = cfg

    def pack(self, sequences: grain.IterDataset[Tokens], seq_len: int) -> grain.IterDataset[Row]:
        """See `Packing.pack`."""
        from axcore.train.data.rows import ConcatThenSplitRows

        return ConcatThenSplitRows(sequences, seq_len)


class FirstFit(Packing):
    """Puts each sequence into the first row with enough room, so that rows contain whole sequences and some padding.

    Sequences that are longer than a row are cut first.
    """

    class Config(Packing.Config):
        open_rows: config.PositiveInt = 32
        """Rows that are filled at the same time."""

    def __init__(self, cfg: FirstFit.Config):
        """
        Raises:
            ConfigError: `open_rows` is not positive.
        """
        self.config = cfg

    def pack(self, sequences: grain.IterDataset[Tokens], seq_len: int) -> grain.IterDataset[Row]:
        """See `Packing.pack`."""
        from axcore.train.data.rows import first_fit_rows

        return first_fit_rows(sequences, seq_len, self.config.open_rows)
