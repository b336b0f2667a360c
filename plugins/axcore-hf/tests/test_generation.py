"""Greedy generation with RoPE that depends on the length, against `transformers` 5.24."""

import json

import jax
import numpy as np
import pytest

from axcore.infer import Generator
from axcore.module import abstract
from axcore.nn import ContiguousCache
from axcore.train.checkpoint.model_folder import flat, like
from axcore_hf import importing
from axcore_hf.families import family_of
from axcore_hf.fields import Fields
from axcore_hf.sources import Safetensors

from .parity.test_parity import RECORDED

pytestmark = pytest.mark.long

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PROMPTS = {
    10: [50, 61, 19, 15, 51, 53, 34, 12, 53, 34],
    18: [57, 27, 16, 46, 55, 20, 25, 8, 61, 62, 45, 37, 37, 42, 48, 38, 50, 31],
}
CASES = [
    ("llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}, 18, True, [12, 59, 0, 16, 62, 26, 18, 12]),
    ("llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}, 18, False, [12, 59, 0, 32, 26, 26, 18, 28]),
    ("phi3", {}, 10, True, [23, 36, 60, 23, 49, 48, 48, 60, 36, 49, 60, 5]),
    ("phi3", {}, 10, False, [23, 36, 60, 23, 49, 48, 48, 60, 36, 49, 60, 5]),
]


@pytest.mark.parametrize(("name", "change", "length", "is_cached", "expected"), CASES)
def test_case_rope_by_length_counts_neither_padding_nor_stale_keys(name, change, length, is_cached, expected):
    """The original length is 16. With a cache, prompts are padded to 16 or 32 tokens; without, to the whole context."""
    fields = Fields(json.loads((RECORDED / name / "config.json").read_text()) | change)
    family = family_of(fields)
    cfg = family.read_config(fields)
    fn, params, state = abstract(cfg)
    arrays = importing.load(family, cfg, Safetensors(RECORDED / name), cfg, flat(params), flat(state))
    model = fn.bind(like(params, arrays), state)
    cache = ContiguousCache.Config() if is_cached else None
    generator = Generator(model, context=30, temperature=0, cache=cache)
    found = generator(np.asarray(PROMPTS[length]), num_tokens=len(expected), key=jax.random.key(0))
    assert found.tolist() == expected
