"""The conformance suite of a grammar compiler."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pytest

import axcore as ax
from axcore.config import AxcoreError, ConfigError
from axcore.infer import Engine, Grammar, GrammarCompiler, GrammarMatcher, SamplingOptions
from axcore.module import Rngs
from axcore.nn import Normal
from axcore.plugin import GrammarCompilerOffer
from axcore.testing.models import tiny_model
from axcore.testing.offer import OfferSuite, offered_config
from axcore.train.data import ByteTokenizer

WALKS, STEPS, LONGEST, ALTERNATIVES = 12, 40, 4, 8


class GrammarCompilerSuite(OfferSuite):
    """Checks that samples match their grammars whichever allowed tokens are chosen, and that every matching text can be
    written.

    ```python
    class TestChoices(GrammarCompilerSuite):
        name = "choices"
        texts = {Grammar.choice(["yes", "no"]): ("yes", "no")}

        def matches(self, grammar, text):
            return text in json.loads(grammar.text)
    ```

    The vocabulary has a token for each byte, tokens of several bytes of `texts`, and tokens without text.

    Attributes:
        texts: some texts that match each grammar. No grammar matches every text.
        unsupported: grammars that are not valid, or that the compiler does not support.
    """

    kind = GrammarCompilerOffer
    texts: ClassVar[Mapping[Grammar, Sequence[str]]]
    unsupported: ClassVar[Sequence[Grammar]] = ()

    def matches(self, grammar: Grammar, text: str) -> bool:
        """Whether a text matches one of the grammars of `texts`, by another implementation."""
        raise NotImplementedError

    def config(self) -> Engine.Config:
        compiler = offered_config(self)
        assert isinstance(compiler, GrammarCompiler.Config)
        return Engine.Config(max_len=64, max_rows=2, grammars=compiler)

    def test_matching_texts_can_be_written_with_any_tokens(self) -> None:
        for grammar, text, matcher in self._each():
            for size in (1, 2, LONGEST):
                row, ahead = text.encode(), matcher.copy()
                for at in range(0, len(row), size):
                    token = self._tokens.index(row[at : at + size])
                    assert _allows(ahead, token), f"{grammar}: {row[:at]!r} may not go on with {row[at : at + size]!r}"
                    ahead.accept(token)
                assert ahead.is_complete, f"{grammar}: {text!r} is not complete"

    def test_samples_match_whichever_allowed_tokens_are_chosen(self) -> None:
        """Random tokens, those of matching texts more often than others, so that samples end."""
        random = np.random.default_rng(0)
        for grammar, texts in self.texts.items():
            ended = 0
            for walk in range(WALKS):
                matcher, row = self._compiler.compile(grammar).copy(), b""
                for _ in range(STEPS):
                    allowed = _ids(matcher.allowed())
                    is_match = _is_text(row) and self.matches(grammar, row.decode())
                    assert matcher.is_complete == is_match, (
                        f"{grammar}: {row!r} {'matches' if is_match else 'does not match'}, but "
                        f"is_complete={matcher.is_complete}"
                    )
                    assert matcher.is_complete or allowed, (
                        f"{grammar}: no token may follow {row!r}, which does not match"
                    )
                    assert allowed or matcher.has_ended, f"{grammar}: no token may follow {row!r}, but has_ended=False"
                    ended += matcher.is_complete
                    if matcher.has_ended or not allowed:
                        break
                    likely = [id for id in allowed if any(self._tokens[id] in text.encode() for text in texts)]
                    chosen = likely if likely and (walk % 3 or random.random() < 0.7) else allowed
                    token = chosen[random.integers(len(chosen))]
                    matcher.accept(token)
                    row += self._tokens[token]
            assert ended, f"{grammar}: no sample of {STEPS} tokens has matched"

    def test_allowed_tokens_lead_to_texts_that_match(self) -> None:
        """Otherwise a sample could never end. A few of the tokens that may follow each part of each text."""
        random = np.random.default_rng(0)
        for grammar, text, matcher in self._each():
            row, matcher = text.encode(), matcher.copy()
            ends = {each.encode()[at:] for each in self.texts[grammar] for at in range(len(each.encode()) + 1)}
            for at in range(len(row)):
                allowed = _ids(matcher.allowed())
                for token in random.permutation(allowed)[:ALTERNATIVES].tolist():
                    ahead = matcher.copy()
                    ahead.accept(token)
                    assert any(self._ends_with(ahead, end) for end in ends), (
                        f"{grammar}: {row[:at] + self._tokens[token]!r} is allowed, but no end of a text of `texts` "
                        f"completes it. If another end does, add such a text"
                    )
                matcher.accept(self._tokens.index(row[at : at + 1]))

    def test_masks_have_a_bit_for_each_token_with_text(self) -> None:
        count, without_text = len(self._tokens), {id for id, each in enumerate(self._tokens) if not each}
        for grammar, _, matcher in self._each():
            words = matcher.allowed()
            assert words.dtype == np.int32 and words.shape == (-(-count // 32),), f"{words.dtype} {words.shape}"
            expected = _ids(words)
            assert not without_text & set(expected) and max(expected) < count, f"{grammar}: tokens without text"
            words[:] = 0
            assert _ids(matcher.allowed()) == expected, f"{grammar}: allowed() must return a new array"

    def test_a_token_is_allowed_if_and_only_if_its_bytes_are(self) -> None:
        for grammar, text, matcher in self._each():
            matcher = matcher.copy()
            for byte in [None, *text.encode()]:
                if byte is not None:
                    matcher.accept(self._tokens.index(bytes([byte])))
                allowed = set(_ids(matcher.allowed()))
                for id, token in enumerate(self._tokens):
                    if len(token) > 1:
                        assert (id in allowed) == (self._written(matcher, token) is not None), f"{grammar}: {token!r}"

    def test_tokens_that_are_not_allowed_raise(self) -> None:
        for grammar, _, matcher in self._each():
            allowed = set(_ids(matcher.allowed()))
            for id, token in enumerate(self._tokens):
                if token and id not in allowed:
                    with pytest.raises(AxcoreError):
                        matcher.copy().accept(id)
                        raise AssertionError(f"{grammar}: accept takes {token!r}, which is not allowed")

    def test_copies_change_independently(self) -> None:
        for grammar, text, matcher in self._each():
            first = self._tokens.index(text.encode()[:1])
            one, other = matcher.copy(), matcher.copy()
            before = _ids(other.allowed())
            one.accept(first)
            assert _ids(other.allowed()) == before and other.is_complete == matcher.is_complete, f"{grammar}: {text!r}"
            other.accept(first)
            assert _ids(one.allowed()) == _ids(other.allowed()), f"{grammar}: {text!r}"

    def test_threads_may_compile_at_the_same_time(self) -> None:
        grammars = list(self.texts) * 4
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(self._compiler.compile, grammars))
        for grammar, matcher in zip(grammars, found, strict=True):
            assert _ids(matcher.allowed()) == _ids(self._compiler.compile(grammar).allowed())

    def test_grammars_that_are_not_supported_raise(self) -> None:
        for grammar in self.unsupported:
            with pytest.raises(ConfigError, match=r"^sampling\.grammar"):
                self._compiler.compile(grammar)

    def test_an_engine_writes_texts_that_match(self) -> None:
        tokenizer = ByteTokenizer.Config().build()
        model = tiny_model().set(vocab_size=tokenizer.vocab_size)
        model = ax.select(model, "embedding").set(init=Normal(stddev=1.0)).build(rngs=Rngs(0))
        with self.config().build(model, tokenizer, eos_ids=(256,)) as engine:
            requests = [
                engine.request("a", SamplingOptions(seed=0, max_tokens=48, grammar=each)) for each in self.texts
            ]
            pieces = engine.generate(requests)
        for grammar, piece in zip(self.texts, pieces, strict=True):
            text = piece.text or ""
            assert piece.finish_reason == "length" or self.matches(grammar, text), f"{grammar}: {text!r}"
        assert any(piece.finish_reason == "stop" for piece in pieces), (
            "no sample has ended; add a grammar of short texts"
        )

    @functools.cached_property
    def _tokens(self) -> list[bytes]:
        """The vocabulary: a token without text, every byte, parts of the texts, and another token without text."""
        rows = [text.encode() for texts in self.texts.values() for text in texts]
        parts = {row[at : at + size] for row in rows for size in range(2, LONGEST + 1) for at in range(len(row))}
        return [b"", *(bytes([byte]) for byte in range(256)), *sorted(part for part in parts if len(part) > 1), b""]

    @property
    def _compiler(self) -> GrammarCompiler:
        cfg = self.config().grammars
        assert cfg is not None
        built: GrammarCompiler = cfg.build(self._tokens)
        return built

    def _each(self) -> Iterator[tuple[Grammar, str, GrammarMatcher]]:
        """Each grammar with each of its texts, and a matcher at the start."""
        compiler = self._compiler
        for grammar, texts in self.texts.items():
            matcher = compiler.compile(grammar)
            for text in texts:
                assert self.matches(grammar, text), f"matches({grammar}, {text!r}) is False, but `texts` has it"
                yield grammar, text, matcher

    def _written(self, matcher: GrammarMatcher, row: bytes) -> GrammarMatcher | None:
        """The matcher after some bytes, as tokens of one byte; None: they may not follow."""
        matcher = matcher.copy()
        for byte in row:
            token = self._tokens.index(bytes([byte]))
            if not _allows(matcher, token):
                return None
            matcher.accept(token)
        return matcher

    def _ends_with(self, matcher: GrammarMatcher, row: bytes) -> bool:
        after = self._written(matcher, row)
        return after is not None and after.is_complete


def _allows(matcher: GrammarMatcher, token: int) -> bool:
    return bool(matcher.allowed()[token // 32] >> token % 32 & 1)


def _ids(words: np.ndarray) -> list[int]:
    """The tokens of a mask."""
    bits = np.unpackbits(np.ascontiguousarray(words, "<i4").view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def _is_text(row: bytes) -> bool:
    try:
        row.decode()
    except UnicodeDecodeError:
        return False
    return True
