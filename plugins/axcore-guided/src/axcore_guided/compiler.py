"""Grammars compiled by llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from axcore.config import AxcoreError, ConfigError
from axcore.infer import Grammar, GrammarCompiler, GrammarMatcher


class LLGuidance(GrammarCompiler):
    """Matches the bytes of tokens with a lexer of derivatives and an Earley parser, which run while a sample grows.
    Compiling is fast, and the first masks of a large grammar take longer than the later ones.
    """

    class Config(GrammarCompiler.Config):
        whitespace: str = r"[ \n\t]{0,20}"
        """A regular expression of the space between the parts of JSON. A bound keeps small models from writing only
        spaces."""

    config: Config

    def __init__(self, cfg: Config, tokens: Sequence[bytes]):
        self.config, self._vocab_size = cfg, len(tokens)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokens)))

    def compile(self, grammar: Grammar) -> Matcher:
        limits = LLParserLimits(verbose_errors=False)
        source = LLMatcher.grammar_from_lark(f"{self._rules(grammar)}\n{_NO_FORCING}")
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConfigError(f"sampling.grammar: {grammar.kind}: {_message(matcher)}")
        return Matcher(matcher, self._vocab_size)

    def _rules(self, grammar: Grammar) -> str:
        """The grammar in the syntax of Lark."""
        if grammar.kind == "regex":
            return f"start: /{regex_to_lark(grammar.text, use_ascii='')}/"
        if grammar.kind == "json_schema":
            return f"start: %json {json.dumps(self._schema(json.loads(grammar.text)))}"
        if grammar.kind == "choice":
            return f"start: {' | '.join(json.dumps(each, ensure_ascii=False) for each in json.loads(grammar.text))}"
        if grammar.kind == "lark":
            return grammar.text
        try:
            return gbnf_to_lark(grammar.text)
        except Exception as error:  # a class of its own for each fault
            raise ConfigError(f"sampling.grammar: gbnf: {error}") from error

    def _schema(self, schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
        """The schema with the option for whitespace."""
        if schema is False:
            return schema
        given = {} if schema is True else schema
        return {**given, "x-guidance": {**given.get("x-guidance", {}), "whitespace_pattern": self.config.whitespace}}


_NO_FORCING = '%llguidance {"no_forcing": true}'
"""Text that a grammar forces may be written with any tokens. Otherwise, llguidance chooses them by a tokenizer."""


class Matcher(GrammarMatcher):
    """The state of one sample.

    Args:
        matcher: the matcher of llguidance.
        vocab_size: the number of tokens.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def has_ended(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self) -> Int32[np.ndarray, " words"]:
        words = np.frombuffer(self._matcher.compute_bitmask(), "<i4").astype(np.int32)
        self._check()
        words[self._vocab_size // 32] &= (1 << self._vocab_size % 32) - 1  # the end token
        return words[: -(-self._vocab_size // 32)]

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._check()
            raise AxcoreError(f"token {token} is not allowed by the grammar")

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise AxcoreError(f"the grammar cannot continue: {_message(self._matcher)}")


class _Vocabulary:
    """What `TokenizerWrapper` requires of a tokenizer.

    The engine decides where end tokens may be sampled, so llguidance gets one of its own after the vocabulary.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]):
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*(id for id, each in enumerate(tokens) if not each), len(tokens)]
        self.tokens = [each or b"<token %d>" % id for id, each in enumerate(tokens)] + [b"<end>"]

    def __call__(self, text: bytes) -> list[int]:
        """Nothing needs the tokens of a text."""
        return []


def _message(matcher: LLMatcher) -> str:
    """The error of a matcher, without the rules and the state of its parser."""
    message = re.split(r"<backtrace>|<state>|<non-verbose/>|\n +1 \| ", matcher.get_error())[0].strip()
    message = message.removeprefix("at 1(8): ").removeprefix("failed to compile JSON schema: ")
    return "no token of the vocabulary continues the text" if message == "NoExtensionBias" else message
