"""Embeddings and beam searches of an engine against recorded ones of `transformers` (see record_inference.py)."""

import json
import pathlib

import numpy as np
import pytest

from axcore.infer import BeamOptions, Engine
from axcore.module import abstract
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat, like
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.initial import FromHF

pytestmark = pytest.mark.long

RECORDED = pathlib.Path(__file__).parent / "recorded"
FAMILIES = sorted(file.parent.name for file in RECORDED.glob("*/inference.json"))


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    """(recorded values, engine)."""
    name = f"hf:{RECORDED / request.param}"
    found = Checkpoint.open(name)
    fn, params, state = abstract(found.model)
    arrays = initial_arrays(FromHF.Config(source=name), found.model, flat(params), flat(state), 0)
    model = fn.bind(like(params, arrays), like(state, arrays))
    recorded = json.loads((RECORDED / request.param / "inference.json").read_text())
    with Engine.Config(max_len=28, max_rows=4, step_tokens=16).build(model) as engine:
        yield recorded, engine


def test_embeddings_are_the_hidden_states_after_the_norm(case):
    recorded, engine = case
    for pooling in ("last", "mean"):
        found = engine.embed([each["prompt"] for each in recorded["prompts"]], pooling=pooling, normalize=False)
        for each, embedding in zip(recorded["prompts"], found, strict=True):
            np.testing.assert_allclose(embedding, each[pooling], atol=1e-5, rtol=1e-5)


def test_beams_and_scores_are_equal(case):
    recorded, engine = case
    ended = set()
    for number in range(len(recorded["prompts"][0]["searches"])):
        given = recorded["prompts"][0]["searches"][number]["options"]
        options = {name: value for name, value in given.items() if name != "max_new_tokens"}
        options = BeamOptions(**options, max_tokens=given["max_new_tokens"], stop_token_ids=tuple(recorded["ends"]))
        searches = engine.beam_search([each["prompt"] for each in recorded["prompts"]], options)
        for each, found in zip(recorded["prompts"], searches, strict=True):
            expected = each["searches"][number]["beams"]
            assert [list(beam.ids) for beam in found] == [beam["ids"] for beam in expected], given
            if expected[0]["score"] is not None:  # greedy search has no scores
                np.testing.assert_allclose([beam.score for beam in found], [beam["score"] for beam in expected], 1e-4)
            ended.update(len(beam.ids) for beam in found)
    assert len(ended) > 2
