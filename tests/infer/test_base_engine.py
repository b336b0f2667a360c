"""What any class with `check` and `submit` gets from `BaseEngine`, without a model."""

import asyncio

import numpy as np
import pytest

from axcore.config import AxcoreError, ConfigError
from axcore.infer import BeamOptions, Piece, Request, SamplingOptions, TokenLogprob
from axcore.infer.engine import BaseEngine
from axcore.train.data import ByteTokenizer

EOS = 0


class Echo(BaseEngine):
    """Answers with the first token of the prompt, as often as the index of the sample, and EOS."""

    def __init__(self, tokenizer=None):
        self.tokenizer, self.eos_ids, self.submitted, self.cancelled = tokenizer, (EOS,), [], []

    def check(self, request):
        if len(request.ids) > 8:
            raise ConfigError("the prompt is too long")

    def submit(self, request, deliver, *, sample=0):
        self.check(request)
        self.submitted.append(request)
        if request.pooling is not None:
            deliver(Piece((), finish_reason="length", embedding=np.array([3.0, 4.0, 0.0], np.float32)))
        elif request.options.prompt_logprobs:
            scores = tuple(TokenLogprob(id, -float(id), 0, ()) for id in request.ids[1:])
            deliver(Piece((EOS,), finish_reason="stop", prompt_logprobs=scores))
        elif request.options.logprobs:
            top = ((EOS, -0.5), (7, -1.0)) if request.ids[-1] == 7 else ((7, -0.1), (EOS, -3.0))
            deliver(Piece((top[0][0],), logprobs=(TokenLogprob(*top[0], 0, top),), finish_reason="length"))
        else:
            for _ in range(sample):
                deliver(Piece(request.ids[:1], "x"))
            deliver(Piece((EOS,), finish_reason="stop"))
        return lambda: self.cancelled.append(request)


def test_generate_returns_the_samples_of_each_request_together():
    found = Echo().generate([Request((4,)), Request((5,))], n=3)
    assert [piece.ids for piece in found] == [(0,), (4, 0), (4, 4, 0), (0,), (5, 0), (5, 5, 0)]
    assert [piece.text for piece in found[:3]] == ["", "x", "xx"] and found[0].finish_reason == "stop"


def test_generate_cancels_what_it_submitted_if_a_sample_fails():
    class Failing(Echo):
        def submit(self, request, deliver, *, sample=0):
            cancel = super().submit(request, lambda piece: None if request.ids == (5,) else deliver(piece))
            if request.ids == (5,):
                deliver(AxcoreError("lost"))
            return cancel

    engine, asked = Failing(), [Request((4,)), Request((5,)), Request((6,))]
    with pytest.raises(AxcoreError, match="lost"):
        engine.generate(asked)
    assert all(request in engine.cancelled for request in asked)


def test_a_stream_of_asyncio_ends_with_the_sample():
    async def run():
        return [piece.ids async for piece in Echo().astream(Request((4,)), sample=2)]

    assert asyncio.run(run()) == [(4,), (4,), (0,)]


def test_texts_become_requests_by_the_tokenizer():
    engine = Echo(ByteTokenizer.Config().build())
    options = SamplingOptions(max_tokens=3)
    ids = tuple(engine.tokenizer.prompt(b"ab").tolist())
    assert engine.request("ab", options, adapter="a") == Request(ids, options, adapter="a")
    engine.score(["ab", (5, 6)], adapter="a")
    assert [(request.ids, request.adapter) for request in engine.submitted] == [(ids, "a"), ((5, 6), "a")]


def test_scores_are_the_log_probabilities_of_the_prompts():
    found = Echo().score([(4, 5, 6), (7,)])
    assert [[each.logprob for each in scores] for scores in found] == [[-5.0, -6.0], []]


def test_embeddings_have_length_one_unless_told():
    engine = Echo()
    (found,) = engine.embed([(4,)], pooling="mean")
    np.testing.assert_allclose(found, [0.6, 0.8, 0.0], rtol=1e-6)
    assert engine.submitted[0].pooling == "mean"
    (found,) = engine.embed([(4,)], normalize=False)
    np.testing.assert_array_equal(found, [3.0, 4.0, 0.0])


def test_a_beam_search_ends_at_the_tokens_of_the_engine():
    (beams,) = Echo().beam_search([(4,)], BeamOptions(max_tokens=4, num_beams=1))
    assert [beam.ids for beam in beams] == [(7, EOS)] and beams[0].logprob == pytest.approx(-0.6)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda engine: engine.request("a"), "engine.request requires a tokenizer"),
        (lambda engine: engine.score(["a"]), "engine.request requires a tokenizer"),
        (lambda engine: engine.score("a"), "expected a list of prompts, not the single prompt 'a'"),
        (lambda engine: engine.embed((4, 5)), r"expected a list of prompts, not the single prompt \[4, 5\]"),
        (lambda engine: engine.embed([range(9)]), "the prompt is too long"),
        (lambda engine: engine.generate(Request((4,))), r"Use engine.generate\(\[request\]\)"),
        (lambda engine: engine.generate([Request((4,))], n=0), "n must be an int of at least 1, not 0"),
    ],
)
def test_wrong_calls_raise(call, text):
    with pytest.raises(ConfigError, match=text):
        call(Echo())
