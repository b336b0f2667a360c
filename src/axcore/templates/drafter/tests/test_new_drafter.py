"""Drafts of axcore-new-drafter are accepted, and change no token."""

import axcore as ax
from axcore.infer import Engine, Request, SamplingOptions
from axcore.testing import DrafterSuite, tiny_model
from axcore_new_drafter.memory import Memory


class TestMemory(DrafterSuite):
    name = "new-drafter"
    options = {"num_speculative_tokens": 3}
    min_accepted = 8


def test_a_repeated_request_takes_fewer_steps():
    cfg = Engine.Config(max_len=32, max_rows=1, speculation=Memory.Config(num_speculative_tokens=3))
    with cfg.build(tiny_model().build(rngs=ax.Rngs(0))) as engine:
        request = Request((1, 2, 3, 4, 5), SamplingOptions(max_tokens=16, seed=1))
        engine.generate([request])
        steps = engine.stats.steps
        engine.generate([request])
        assert engine.stats.steps - steps <= 8
