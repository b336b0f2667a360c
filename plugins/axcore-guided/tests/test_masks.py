"""Masks of llguidance equal those of derivatives of regular expressions."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from axcore.config import AxcoreError
from axcore.infer import Grammar
from axcore_guided.compiler import LLGuidance, Matcher

from .expressions import LETTERS, NOTHING, regexes

TOKENS = [b"", *("".join(each).encode() for n in (1, 2, 3) for each in itertools.product(LETTERS, repeat=n)), b"d", b""]
COUNT, COMPILER = len(TOKENS), LLGuidance.Config().build(TOKENS)


def allowed(matcher, count=COUNT):
    words = matcher.allowed()
    assert words.dtype == np.int32 and words.shape == (-(-count // 32),)
    bits = np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little")
    assert not bits[count:].any()
    return set(np.flatnonzero(bits).tolist())


def check_walk(regex, draw, compiler=COMPILER):
    """Follows a random text, and compares the masks on the way."""
    matcher, text, rest = compiler.compile(Grammar.regex(regex.pattern)), "", regex
    for _ in range(5):
        expected = {id for id, token in enumerate(TOKENS) if token and rest.after_text(token.decode()) != NOTHING}
        assert allowed(matcher) == expected
        assert matcher.is_complete == rest.is_nullable == bool(re.fullmatch(regex.pattern, text))
        assert matcher.has_ended == (not expected)
        if not expected:
            return
        token = draw(st.sampled_from(sorted(expected)))
        fork = matcher.copy()
        matcher.accept(token)
        assert allowed(fork) == expected
        text += TOKENS[token].decode()
        rest = rest.after_text(TOKENS[token].decode())


@settings(deadline=None, max_examples=60)
@given(regexes, st.data())
def test_masks_are_those_of_derivatives(regex, data):
    check_walk(regex, data.draw)


class Late(Matcher):
    """Wrong: its masks are those before the last token."""

    last = None

    def accept(self, token):
        self.last = super().allowed()
        super().accept(token)

    def allowed(self):
        return super().allowed() if self.last is None else self.last

    def copy(self):
        return Late(self._matcher.deep_copy(), self._vocab_size)


class Shifted(Matcher):
    """Wrong: bit i is that of token i + 1."""

    def allowed(self):
        bits = np.unpackbits(super().allowed().astype("<i4").view(np.uint8), bitorder="little")
        return np.packbits(np.roll(bits, -1), bitorder="little").view("<i4")


class Shared(Matcher):
    """Wrong: a copy changes with the original."""

    def copy(self):
        return self


class EndsAnywhere(Matcher):
    """Wrong: every text is complete."""

    is_complete = True


@pytest.mark.parametrize("wrong", [Late, Shifted, Shared, EndsAnywhere])
def test_wrong_matchers_are_caught(wrong):
    class Compiler:
        def compile(self, grammar):
            right = COMPILER.compile(grammar)
            return wrong(right._matcher, right._vocab_size)

    @settings(deadline=None, database=None, max_examples=60)
    @given(regexes, st.data())
    def check(regex, data):
        check_walk(regex, data.draw, Compiler())

    with pytest.raises((BaseExceptionGroup, AssertionError, AxcoreError)):
        check()


@pytest.mark.parametrize("pattern", ["ac", "c", r"[^\s\S]"])
def test_a_grammar_that_the_vocabulary_cannot_express_fails(pattern):
    compiler = LLGuidance.Config().build([b"a", b"b", b"ab"])
    matcher = compiler.compile(Grammar.regex(pattern))
    with pytest.raises(AxcoreError, match="no token of the vocabulary continues the text"):
        for token in (0, 2):
            if matcher.allowed()[0] & 1:
                matcher.accept(token)


@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 65])
def test_the_last_word_has_no_bits_of_other_tokens(count):
    matcher = LLGuidance.Config().build([bytes([1 + id]) for id in range(count)]).compile(Grammar.regex("(?s).*"))
    assert allowed(matcher, count) == set(range(count))


def test_a_token_that_is_not_allowed_raises():
    matcher = COMPILER.compile(Grammar.regex("ab"))
    with pytest.raises(AxcoreError, match=r'the grammar cannot continue: .*"b" doesn\'t satisfy the grammar'):
        matcher.accept(TOKENS.index(b"b"))
    with pytest.raises(AxcoreError, match="the grammar cannot continue"):
        matcher.allowed()


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.choice(['"é\\\n', "ab"]), '"é\\\n'),
        (Grammar.json_schema({"const": {"a": [1, "é"]}}), '{"a": [1,"é"]}'),
        (Grammar.json_object(), '{"x": {"y": [true, null, -1.5e3, "é\\n"]}}'),
        (Grammar("lark", 'start: "(" start? ")"'), "((()))"),
        (Grammar("gbnf", 'root ::= "(" root? ")"'), "((()))"),
        (Grammar.regex("[à-ü]{2}"), "éü"),
    ],
)
def test_the_whole_text_matches_and_no_part_of_it_does(grammar, text):
    matcher = LLGuidance.Config().build([bytes([byte]) for byte in range(256)]).compile(grammar)
    for byte in text.encode():
        assert not matcher.is_complete
        assert byte in allowed(matcher, 256)
        matcher.accept(byte)
    assert matcher.is_complete and matcher.has_ended


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.choice(["answer number 1", "answer number 2"]),
        Grammar.regex("answer number [12]"),
        Grammar("lark", 'start: "answer number " /[12]/'),
        Grammar("gbnf", 'root ::= "answer number " [12]'),
    ],
)
def test_text_that_a_grammar_forces_may_be_written_with_any_tokens(grammar):
    tokens = [b"answer", b" num", b"answer n", b"number", *(bytes([byte]) for byte in range(256))]
    matcher = LLGuidance.Config().build(tokens).compile(grammar)
    assert {tokens[id] for id in allowed(matcher, len(tokens))} == {b"a", b"answer", b"answer n"}
    matcher.accept(0)
    assert {tokens[id] for id in allowed(matcher, len(tokens))} == {b" ", b" num"}


def test_objects_that_a_schema_forces_may_be_written_with_any_tokens():
    tokens = [b'{"', b'{"answer', b"answer", *(bytes([byte]) for byte in range(256))]
    compiler = LLGuidance.Config(whitespace="").build(tokens)
    matcher = compiler.compile(Grammar.json_schema({"const": {"answer": 1}}))
    assert {tokens[id] for id in allowed(matcher, len(tokens))} == {b"{", b'{"', b'{"answer'}
    assert compiler.compile(Grammar.json_schema(True)).allowed().any()


def test_whitespace_in_json_is_bounded_by_the_config():
    compact = LLGuidance.Config(whitespace="").build([bytes([byte]) for byte in range(256)])
    usual = LLGuidance.Config().build([bytes([byte]) for byte in range(256)])
    found = []
    for compiler in (compact, usual):
        matcher = compiler.compile(Grammar.json_schema({"type": "array"}))
        matcher.accept(ord("["))
        count = 0
        while ord(" ") in allowed(matcher, 256):
            matcher.accept(ord(" "))
            count += 1
        found.append(count)
    assert found == [0, 20]
