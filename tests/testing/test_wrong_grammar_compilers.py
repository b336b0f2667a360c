"""`GrammarCompilerSuite` fails for compilers that are wrong in one way, and passes for a correct one."""

import json

import numpy as np
import pytest

from axcore.config import AxcoreError, ConfigError
from axcore.infer import Engine, Grammar, GrammarCompiler, GrammarMatcher
from axcore.testing import GrammarCompilerSuite

from .wrong import instance

TEXTS = ("yes", "yes!", "no")


class Choice(GrammarMatcher):
    """What is left of the texts that begin as the sample does."""

    def __init__(self, tokens, left):
        self.tokens, self.left = tokens, left

    @property
    def is_complete(self):
        return b"" in self.left

    @property
    def has_ended(self):
        return self.left <= {b""}

    def can_follow(self, token):
        return any(token and each.startswith(token) for each in self.left)

    def allowed(self):
        bits = np.zeros(-(-len(self.tokens) // 32) * 32, np.uint8)
        bits[[id for id, token in enumerate(self.tokens) if self.can_follow(token)]] = 1
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def accept(self, token):
        text = self.tokens[token]
        if not self.can_follow(text):
            raise AxcoreError(f"token {token} is not allowed")
        self.left = frozenset(each[len(text) :] for each in self.left if each.startswith(text))

    def copy(self):
        return type(self)(self.tokens, self.left)


class LetsThrough(Choice):
    """Allows a token that no text has, and ignores it."""

    def can_follow(self, token):
        return super().can_follow(token) or token == b"x"

    def accept(self, token):
        if self.tokens[token] != b"x":
            super().accept(token)


class LeadsNowhere(Choice):
    """Allows the first byte of a token whose rest cannot follow."""

    def can_follow(self, token):
        return super().can_follow(token) or token == b"x"

    def accept(self, token):
        self.left = frozenset() if self.tokens[token] == b"x" else self.left
        if self.left:
            super().accept(token)


class NeverEnds(Choice):
    @property
    def has_ended(self):
        return False


class NeverCompletes(Choice):
    @property
    def is_complete(self):
        return False


class CompletesEarly(Choice):
    @property
    def is_complete(self):
        return any(len(each) < 2 for each in self.left)


class GoesOn(Choice):
    """Allows anything after a complete text."""

    def can_follow(self, token):
        return super().can_follow(token) or (b"" in self.left and bool(token))

    def accept(self, token):
        if Choice.can_follow(self, self.tokens[token]):
            super().accept(token)


class BytesOnly(Choice):
    """Forgets tokens of several bytes."""

    def can_follow(self, token):
        return len(token) == 1 and super().can_follow(token)


class AllowsEmpty(Choice):
    def allowed(self):
        words = super().allowed()
        words[0] |= 1  # a token without text
        return words


class Wide(Choice):
    def allowed(self):
        return np.append(super().allowed(), np.int32(0))


class SharesMask(Choice):
    def allowed(self):
        self.mask = getattr(self, "mask", None)
        self.mask = super().allowed() if self.mask is None else self.mask
        return self.mask

    def accept(self, token):
        super().accept(token)
        self.mask = None


class SharesState(Choice):
    def copy(self):
        return self


class AcceptsAnything(Choice):
    def accept(self, token):
        text = self.tokens[token]
        self.left = frozenset(each[len(text) :] for each in self.left if each.startswith(text))


def compiler(matcher, *, checks=True):
    class Made(GrammarCompiler):
        class Config(GrammarCompiler.Config):
            pass

        def __init__(self, cfg, tokens):
            self.tokens = tokens

        def compile(self, grammar):
            if grammar.kind != "choice" and checks:
                raise ConfigError(f"sampling.grammar: {grammar.kind} is not supported")
            texts = json.loads(grammar.text) if grammar.kind == "choice" else [grammar.text]
            return matcher(self.tokens, frozenset(text.encode() for text in texts))

    return Engine.Config(max_len=64, max_rows=2, grammars=Made.Config())


def suite(matcher, **options):
    return instance(
        GrammarCompilerSuite,
        name="llguidance",
        texts={Grammar.choice(TEXTS): TEXTS},
        unsupported=(Grammar.regex("a"),),
        matches=lambda self, grammar, text: text in TEXTS,
        config=lambda self: compiler(matcher, **options),
    )


CHECKS = (
    "test_matching_texts_can_be_written_with_any_tokens",
    "test_samples_match_whichever_allowed_tokens_are_chosen",
    "test_allowed_tokens_lead_to_texts_that_match",
    "test_masks_have_a_bit_for_each_token_with_text",
    "test_a_token_is_allowed_if_and_only_if_its_bytes_are",
    "test_tokens_that_are_not_allowed_raise",
    "test_copies_change_independently",
    "test_threads_may_compile_at_the_same_time",
    "test_grammars_that_are_not_supported_raise",
)
WRITTEN, SAMPLES, LEAD, MASKS, BYTES, RAISE, COPIES, _, UNSUPPORTED = CHECKS
WRONG = {
    LetsThrough: SAMPLES,
    LeadsNowhere: LEAD,
    NeverEnds: SAMPLES,
    NeverCompletes: WRITTEN,
    CompletesEarly: SAMPLES,
    GoesOn: SAMPLES,
    BytesOnly: BYTES,
    AllowsEmpty: MASKS,
    Wide: MASKS,
    SharesMask: MASKS,
    SharesState: COPIES,
    AcceptsAnything: RAISE,
}


@pytest.mark.parametrize("check", CHECKS)
def test_case_a_correct_compiler_passes(check):
    getattr(suite(Choice), check)()


@pytest.mark.parametrize("matcher", WRONG, ids=lambda each: each.__name__)
def test_case_a_wrong_compiler_fails(matcher):
    with pytest.raises(AssertionError):
        getattr(suite(matcher), WRONG[matcher])()


def test_case_a_compiler_that_takes_every_grammar_fails():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        getattr(suite(Choice, checks=False), UNSUPPORTED)()


def test_case_texts_that_do_not_match_are_an_error_of_the_suite():
    wrong = suite(Choice)
    type(wrong).texts = {Grammar.choice(TEXTS): ("maybe",)}
    with pytest.raises(AssertionError, match="is False, but `texts` has it"):
        getattr(wrong, WRITTEN)()


@pytest.mark.long
def test_case_an_engine_writes_texts_of_a_correct_compiler_only():
    suite(Choice).test_an_engine_writes_texts_that_match()
    with pytest.raises(AssertionError, match="'maybe'"):
        suite(lambda tokens, _: Choice(tokens, frozenset({b"maybe"}))).test_an_engine_writes_texts_that_match()
