"""Tokenizers: bytes to token ids and back."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from axcore import config


class Tokenizer(config.Configurable, abc.ABC):
    """Base class of tokenizers, which convert the bytes of a document to token ids."""

    class Config(config.Config):
        """No common options."""

    vocab_size: int
    """Exclusive upper bound of ids: the number of rows of the model's embedding, including unused rows."""

    separator_id: int
    """The id before each document. `encode` never returns it."""

    bytes_per_token: float = 4.0
    """Approximate bytes of text per token. It determines the default of `TextInput.Config.piece_bytes`."""

    chat_template: str | None = None
    """The Jinja template of chats, as in published checkpoints: it turns messages into the text of a prompt, special
    tokens included. None: the model has none."""

    special_tokens: Mapping[str, str] = MappingProxyType({})
    """The text of special tokens by the names that `chat_template` uses, such as `bos_token`."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generated text."""
        return (self.separator_id,)

    def prompt(self, content: bytes) -> NDArray[np.integer]:
        """`[tokens]`, at least one: the ids of a prompt for generation."""
        return np.concatenate([[self.separator_id], self.encode(content)])

    @abc.abstractmethod
    def encode(self, content: bytes) -> NDArray[np.integer]:
        """`[tokens]`, of any integer dtype: the ids of one document, without a separator."""

    @abc.abstractmethod
    def decode(self, ids: NDArray[np.integer]) -> bytes:
        """The bytes of `[tokens]` ids, also those of incomplete characters. The separator and unused ids decode to
        nothing. More tokens only append bytes. Those of a token depend on itself and on the last token before it that
        has bytes, so that text can be streamed."""


class ByteTokenizer(Tokenizer):
    """One token per byte: ids 0 to 255 are the bytes, 256 is the separator."""

    class Config(Tokenizer.Config):
        """Options of the byte tokenizer."""

        vocab_multiple: config.PositiveInt = 8
        """`vocab_size` is 257 rounded up to a multiple of this (264), so that the vocabulary axis can be
        sharded."""

    separator_id = 256
    bytes_per_token = 1.0

    def __init__(self, cfg: ByteTokenizer.Config):
        """
        Raises:
            ConfigError: `vocab_multiple` is not positive.
        """
        self.vocab_size = -(-257 // cfg.vocab_multiple) * cfg.vocab_multiple

    def encode(self, content: bytes) -> NDArray[np.integer]:
        return np.frombuffer(content, np.uint8)

    def decode(self, ids: NDArray[np.integer]) -> bytes:
        ids = np.asarray(ids)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes()
