"""Guided decoding: the grammar of a request, and what a plugin implements to enforce it."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Self, get_args

import numpy as np
from jaxtyping import Int32

from axcore import config
from axcore.config import ConfigError

type GrammarKind = Literal["regex", "json_schema", "choice", "lark", "gbnf"]
"""The language of a grammar."""

_KINDS = get_args(GrammarKind.__value__)


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A description of the texts that a sample may have. The whole output matches it.

    ```python
    SamplingOptions(grammar=Grammar.regex(r"[0-9]{3}-[0-9]{4}"))
    SamplingOptions(grammar=Grammar.json_schema({"type": "array", "items": {"type": "integer"}}))
    SamplingOptions(grammar=Grammar.choice(["yes", "no"]))
    ```

    Attributes:
        kind: the language of `text`.
        text: a regular expression, a JSON schema, a JSON array of strings (`choice`), or the rules of a context-free
            grammar in the syntax of Lark or of GBNF.

    Raises:
        ConfigError: the kind is unknown, the schema is not JSON, there is no choice, or the text has a surrogate.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"sampling.grammar: kind={self.kind!r} is unknown. Use one of {', '.join(_KINDS)}")
        if not isinstance(self.text, str):
            raise ConfigError(f"sampling.grammar: text={self.text!r} must be a string. Use Grammar.{self.kind}(...)")
        _check_characters(self.text)
        if self.kind in ("json_schema", "choice"):
            try:
                value = json.loads(self.text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"sampling.grammar: the {self.kind} is not JSON: {error}. Use json.dumps") from error
            _check_characters(_dumped(value))
            if self.kind == "json_schema" and not isinstance(value, dict | bool):
                raise ConfigError(f"sampling.grammar: the schema {_shown(value)} must be a JSON object or a boolean")
            if self.kind == "choice" and not _is_choice(value):
                raise ConfigError(
                    f"sampling.grammar: choice {_shown(value)} must be a list of strings, at least one and none empty"
                )

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """The texts that a regular expression matches from start to end, in the syntax of Rust's `regex`."""
        return cls("regex", pattern)

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | bool | str) -> Self:
        """JSON values that a schema (draft 2020-12) accepts, given as an object or as its text."""
        return cls("json_schema", schema if isinstance(schema, str) else _dumped(schema))

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def rules(cls, text: str) -> Self:
        """The texts of a context-free grammar: in the syntax of GBNF if the rules contain `::=`, otherwise of Lark."""
        return cls("gbnf" if "::=" in text else "lark", text)

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Self:
        """One of several texts."""
        return cls("choice", _dumped(list(texts)))


def _dumped(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"sampling.grammar: {_shown(value)} is not JSON: {error}") from error


def _check_characters(text: str) -> None:
    """Refuses halves of UTF-16 pairs, of which Python makes strings, too, such as arguments that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"sampling.grammar: {_shown(text[max(0, error.start - 8) : error.end + 8])} has a surrogate, "
            f"{text[error.start]!r}, which is not a character. Use UTF-8"
        ) from error


def _is_choice(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class GrammarMatcher(abc.ABC):
    """The state of one sample in its grammar: the text so far, and what may follow. One thread at a time uses it."""

    @property
    @abc.abstractmethod
    def is_complete(self) -> bool:
        """Whether the text so far matches the whole grammar, so that the sample may end."""

    @property
    @abc.abstractmethod
    def has_ended(self) -> bool:
        """Whether no text may follow."""

    @abc.abstractmethod
    def allowed(self) -> Int32[np.ndarray, " words"]:
        """The tokens that may follow: bit i % 32 of word i // 32, in a new array. Tokens without text are not allowed,
        unless the grammar names them.

        Raises:
            AxcoreError: the grammar is too complex to continue.
        """

    @abc.abstractmethod
    def accept(self, token: int) -> None:
        """Adds the text of an allowed token.

        Raises:
            AxcoreError: the token is not allowed, or the grammar is too complex to continue.
        """

    @abc.abstractmethod
    def copy(self) -> GrammarMatcher:
        """A matcher in the same state, which changes independently. May be called from any thread."""


class GrammarCompiler(config.Configurable, abc.ABC):
    """Converts grammars to matchers, for the slot `grammars` of `Engine.Config`.

    Args:
        tokens: the bytes of each token of the model's vocabulary, also those of incomplete characters. A token without
            bytes has no text, such as an EOS token or padding.
    """

    class Config(config.Config):
        """No common options."""

    @abc.abstractmethod
    def __init__(self, cfg: Config, tokens: Sequence[bytes]): ...

    @abc.abstractmethod
    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the start of a text. It is called from several threads, may take long, and is not called again
        for grammars that were used recently.

        Raises:
            ConfigError: the grammar is not valid, the compiler does not support it, or it is too large. The message
                starts with `sampling.grammar`.
        """
