"""The grammars of an engine: compiled once, and followed by each sample on the host."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

from axcore.config import AxcoreError, ConfigError
from axcore.infer.grammar import Grammar, GrammarCompiler, GrammarMatcher
from axcore.infer.requests import SamplingOptions
from axcore.infer.text import token_bytes

if TYPE_CHECKING:
    from axcore.train.data.tokenizers import Tokenizer

NUM_CACHED = 128
"""The number of compiled grammars that an engine keeps."""


class Guide:
    """The tokens that may follow in one sample: those of its grammar, and EOS tokens where the grammar is complete.

    Args:
        matcher: a matcher that no other sample has.
        stop_token_ids: tokens without text that end the sample.
        vocab_size: the number of token ids.

    Attributes:
        failure: why the sample cannot continue; None: it can.
    """

    def __init__(self, matcher: GrammarMatcher, stop_token_ids: Iterable[int], vocab_size: int):
        self.failure: AxcoreError | None = None
        self._matcher = matcher
        self._ends = _mask(stop_token_ids, vocab_size)

    @property
    def has_ended(self) -> bool:
        """Whether the grammar is complete and no text may follow."""
        return self._matcher.has_ended and self._matcher.is_complete

    def masks(self, drafts: tuple[int, ...] = ()) -> list[Int32[np.ndarray, " words"]]:
        """The tokens that may follow, as `NextToken.grammar`, and those that may follow each draft.

        None may follow if there is a `failure`. The masks after a draft that ends the sample, or that the grammar does
        not allow, have no meaning.
        """
        try:
            masks = [np.zeros_like(self._ends) if self.failure is not None else self._mask(self._matcher)]
        except AxcoreError as error:
            self.failure, masks = error, [np.zeros_like(self._ends)]
        if drafts and self.failure is None:
            ahead = self._matcher.copy()
            with contextlib.suppress(AxcoreError):
                for draft in drafts:
                    ahead.accept(draft)
                    masks.append(self._mask(ahead))
        return masks + masks[-1:] * (1 + len(drafts) - len(masks))

    def _mask(self, matcher: GrammarMatcher) -> Int32[np.ndarray, " words"]:
        allowed = matcher.allowed()
        return allowed | self._ends if matcher.is_complete else allowed

    def accept(self, token: int) -> None:
        """Adds a sampled token that is not an EOS token."""
        try:
            self._matcher.accept(token)
        except AxcoreError as error:
            self.failure = error


def _mask(ids: Iterable[int], vocab_size: int) -> Int32[np.ndarray, " words"]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


class Grammars:
    """Compiles the grammars of requests. Methods may be called from any thread.

    Args:
        cfg: the compiler.
        tokenizer: the tokenizer of the model.
        vocab_size: the number of token ids of the model.
        eos_ids: the tokens that end a sample.
    """

    def __init__(self, cfg: GrammarCompiler.Config, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]):
        self._cfg, self._tokenizer, self._vocab_size, self._eos_ids = cfg, tokenizer, vocab_size, frozenset(eos_ids)
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(NUM_CACHED)(self._compile)

    def warm_up(self) -> None:
        """Builds the compiler, which reads the whole vocabulary. Otherwise the first grammar does."""
        with self._lock:  # the first grammar of several threads
            _ = self._compiler

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar.

        Raises:
            ConfigError: see `GrammarCompiler.compile`. Or no text of the vocabulary matches.
        """
        self._compiled(grammar)

    def guide(self, options: SamplingOptions) -> Guide | None:
        """A guide at the start of a sample; None: the options have no grammar. For errors see `check`."""
        if options.grammar is None:
            return None
        self.warm_up()
        ends = [id for id in options.all_stop_token_ids(self._eos_ids) if not self._tokens[id]]
        return Guide(self._compiled(options.grammar).copy(), ends, self._vocab_size)

    def _compile(self, grammar: Grammar) -> GrammarMatcher:
        self.warm_up()
        matcher = self._compiler.compile(grammar)
        try:
            is_empty = not matcher.is_complete and not matcher.copy().allowed().any()
        except AxcoreError as error:
            raise ConfigError(f"sampling.grammar: {error}") from error
        if is_empty:
            raise ConfigError(
                "sampling.grammar: no token of the vocabulary starts a text that matches. Use a grammar that matches "
                "some text"
            )
        return matcher

    @functools.cached_property
    def _tokens(self) -> list[bytes]:
        return [
            b"" if id in self._eos_ids else token_bytes(self._tokenizer, id)
            for id in range(min(self._vocab_size, self._tokenizer.vocab_size))
        ] + [b""] * (self._vocab_size - self._tokenizer.vocab_size)

    @functools.cached_property
    def _compiler(self) -> GrammarCompiler:
        built: GrammarCompiler = self._cfg.build(self._tokens)
        return built
