"""A model of bytes with random weights, and engines of it."""

import axcore as ax
from axcore.infer import Engine
from axcore.testing.models import tiny_model
from axcore.train.data import ByteTokenizer
from axcore_guided.compiler import LLGuidance
from axcore_paged_kv.cache import PagedCache

TOKENIZER = ByteTokenizer.Config().build()
END = TOKENIZER.separator_id


def text_model():
    """Its greedy text varies."""
    cfg = tiny_model().set(vocab_size=TOKENIZER.vocab_size)
    cfg = ax.select(cfg, "embedding").set(init=ax.nn.Normal(stddev=1.0))
    return ax.pipe(cfg, ax.use("rope")).build(rngs=ax.Rngs(0))


def guided_engine(model, **fields):
    cache = PagedCache.Config(page_size=4, num_pages=60)
    usual = {"max_len": 96, "max_rows": 4, "step_tokens": 32, "cache": cache, "grammars": LLGuidance.Config()}
    return Engine.Config(**usual | fields).build(model, TOKENIZER, eos_ids=(END,))
