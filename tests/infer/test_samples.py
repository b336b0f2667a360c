"""The pieces that the tokens of a sample become, without a model."""

import numpy as np
import pytest

from axcore.config import AxcoreError
from axcore.infer import Request, SamplingOptions, TokenLogprob
from axcore.infer.embeddings import PooledStates
from axcore.infer.engine.samples import Sample
from axcore.infer.execution.step_in_flight import SampledToken
from axcore.infer.sequences import Sequence
from axcore.infer.text import TextStream
from axcore.train.data import ByteTokenizer

TOKENIZER = ByteTokenizer.Config().build()
EOS = 5


class EndsAfter:
    """A grammar that ends after some tokens."""

    failure = None

    def __init__(self, count):
        self.count, self.accepted = count, []

    def accept(self, token):
        self.accepted.append(token)

    @property
    def has_ended(self):
        return len(self.accepted) >= self.count


def sample_of(options=None, *, max_len=20, prompt=(1, 2), **fields):
    sequence = Sequence(0, Request(prompt, options or SamplingOptions()), (EOS,))
    sequence.max_len = max_len
    return Sample(sequence, deliver=None, seed=(0, 0), **fields)


def piece(sample, tokens):
    """The piece of tokens that a step samples."""
    count = sample.sequence.extend(tokens)
    return sample.piece([SampledToken(token, None) for token in tokens[:count]])


def with_text(stop=()):
    return {"text": TextStream(TOKENIZER, stop=stop)}


def test_a_stop_string_ends_the_sequence_after_its_last_token():
    sample = sample_of(**with_text(("lo",)))
    found = piece(sample, tuple(b"hello you"))
    assert (bytes(found.ids), found.text, found.finish_reason) == (b"hello", "hel", "stop")
    assert bytes(sample.sequence.output) == b"hello" and sample.sequence.finish_reason == "stop"


def test_a_stop_string_counts_if_the_last_token_is_the_last_of_its_length():
    sample = sample_of(max_len=4, **with_text(("b",)))
    assert piece(sample, tuple(b"ab")).finish_reason == "stop"


def test_text_that_may_begin_a_stop_string_is_delivered_when_the_sample_ends():
    sample = sample_of(max_len=7, **with_text(("lost",)))
    assert piece(sample, tuple(b"hel")).text == "he"
    last = piece(sample, tuple(b"lo"))
    assert (last.text, last.finish_reason) == ("llo", "length")


def test_the_end_of_a_grammar_ends_the_sequence_and_its_guide_sees_no_eos():
    sample = sample_of(guide=EndsAfter(2))
    found = piece(sample, (7, 8, 9))
    assert (found.ids, found.finish_reason, sample.sequence.output) == ((7, 8), "stop", [7, 8])
    sample = sample_of(guide=EndsAfter(9))
    assert piece(sample, (7, EOS)).finish_reason == "stop" and sample.guide.accepted == [7]


def test_the_first_piece_has_the_scores_of_the_prompt():
    scores = {at: TokenLogprob(at, -1.0, 0, ()) for at in (2, 1)}
    sample = sample_of(SamplingOptions(prompt_logprobs=True), prompt=(3, 1, 2), prompt_scores=scores)
    assert [each.id for each in piece(sample, (7,)).prompt_logprobs] == [1, 2]
    assert piece(sample, (8,)).prompt_logprobs is None


def test_an_embedding_that_is_not_finite_is_an_error():
    for value in (1.0, np.nan):
        sample = sample_of(pooled=PooledStates("last"))
        sample.pooled.add(np.full((2, 3), value, np.float32), start=0)
        found = sample.embedding()
        assert isinstance(found, AxcoreError) == bool(np.isnan(value))
    assert "not finite" in str(found)


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_sample_without_a_next_token_tells_why(has_failed):
    guide = EndsAfter(3)
    guide.failure = AxcoreError("too deep") if has_failed else None
    assert ("too deep" if has_failed else "no token can be sampled") in str(sample_of(guide=guide).failure)
