"""Grammars that match one of several texts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

import axcore as ax
from axcore.infer import Grammar, GrammarCompiler, GrammarMatcher


class Choices(GrammarCompiler):
    """Matches one of the texts of `Grammar.choice`, whichever tokens write it."""

    class Config(GrammarCompiler.Config):
        ignore_case: bool = False
        """Whether upper-case and lower-case ASCII letters are the same."""

    config: Config

    def __init__(self, cfg: Config, tokens: Sequence[bytes]):
        self.config = cfg
        self.tokens = [self._folded(token) for token in tokens]

    def compile(self, grammar: Grammar) -> Choice:
        """See `GrammarCompiler.compile`."""
        if grammar.kind != "choice":
            raise ax.ConfigError(f"sampling.grammar: {grammar.kind} is not supported. Use Grammar.choice([...])")
        texts = [text.encode() for text in json.loads(grammar.text)]
        return Choice(self.tokens, frozenset(map(self._folded, texts)))

    def _folded(self, text: bytes) -> bytes:
        return text.lower() if self.config.ignore_case else text


class Choice(GrammarMatcher):
    """What is left to write of the texts that begin as the sample does.

    Args:
        tokens: the bytes of each token.
        left: what may follow. An empty text means that the sample is complete.
    """

    def __init__(self, tokens: Sequence[bytes], left: frozenset[bytes]):
        self._tokens, self._left = tokens, left

    @property
    def is_complete(self) -> bool:
        return b"" in self._left

    @property
    def has_ended(self) -> bool:
        return self._left <= {b""}

    def allowed(self) -> Int32[np.ndarray, " words"]:
        bits = np.zeros(-(-len(self._tokens) // 32) * 32, np.uint8)
        starts = {text[:size] for text in self._left for size in range(1, len(text) + 1)}
        bits[[id for id, token in enumerate(self._tokens) if token in starts]] = 1
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def accept(self, token: int) -> None:
        text = self._tokens[token]
        left = frozenset(each[len(text) :] for each in self._left if text and each.startswith(text))
        if not left:
            raise ax.AxcoreError(f"token {token} is not allowed by the grammar")
        self._left = left

    def copy(self) -> Choice:
        return Choice(self._tokens, self._left)
