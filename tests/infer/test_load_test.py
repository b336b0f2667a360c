"""`load_test.measure` submits each request once, and its figures are those of the pieces."""

import dataclasses

import pytest

from axcore.config import AxcoreError
from axcore.infer import Piece
from axcore.infer.load_test import Load, measure

LOAD = Load(num_requests=6, prompt_tokens=3, output_tokens=2, concurrency=4)


@dataclasses.dataclass
class Instant:
    """An engine that answers before `submit` returns, so that requests end while others are still submitted."""

    answers: tuple[object, ...] = (Piece((1,)), Piece((2,), finish_reason="length"))
    vocab_size: int = 16
    submitted: list[object] = dataclasses.field(default_factory=list)

    def submit(self, request, deliver):
        self.submitted.append(request)
        for each in self.answers:
            deliver(each)


@pytest.mark.parametrize("concurrency", [1, 4, 9])
def test_each_request_is_submitted_once(concurrency):
    engine = Instant()
    figures = measure(engine, dataclasses.replace(LOAD, concurrency=concurrency), seed=3)
    assert len(engine.submitted) == len(set(engine.submitted)) == LOAD.num_requests
    assert all(len(request.ids) == 3 and request.options.max_tokens == 2 for request in engine.submitted)
    assert figures.output_tokens_per_s == pytest.approx(12 / figures.seconds)


def test_an_error_of_a_request_raises():
    with pytest.raises(AxcoreError, match="lost"):
        measure(Instant(answers=(AxcoreError("lost"),)), LOAD)
