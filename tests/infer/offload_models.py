"""Models and caches of every kind, and requests, for tests that move decoding state."""

import dataclasses

import numpy as np

import axcore as ax
from axcore.infer import Engine, Request, SamplingOptions
from axcore.nn import Attention, ContiguousCache, LatentAttention
from axcore.testing.models import VOCAB_SIZE, tiny_model
from axcore_paged_kv.cache import PagedCache
from axcore_rope.rotary import Rotary

MAX_LEN = 48
GREEDY = SamplingOptions(temperature=0.0, max_tokens=14, ignore_eos=True)
SEEDED = SamplingOptions(
    seed=11, top_k=8, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.1, max_tokens=14, ignore_eos=True
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its cache.

    Attributes:
        features: what the tiny model uses.
        cache: the cache; its pool is as small as an engine needs to preempt.
        large: the same cache with a large pool.
    """

    features: tuple = ()
    cache: object = ContiguousCache.Config()
    is_latent: bool = False

    @property
    def is_paged(self):
        return isinstance(self.cache, PagedCache.Config)

    @property
    def large(self):
        return self.cache.set(num_pages=60) if self.is_paged else self.cache

    def model(self, seed=0):
        cfg = ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0))
        if self.is_latent:
            sizes = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "value_dim": 3}
            latent = LatentAttention.Config(num_heads=4, position=Rotary.Config(), **sizes)
            cfg = ax.select(cfg, Attention).map(lambda *_: latent)
        else:
            cfg = ax.use("rope")(cfg)
        return ax.pipe(cfg, *(ax.use(name, **options) for name, options in self.features)).build(rngs=ax.Rngs(seed))

    def engine(self, model, *, cache=None, **fields):
        sizes = {"max_len": MAX_LEN, "max_rows": 3 if self.is_paged else 2, "step_tokens": 16}
        return Engine.Config(cache=cache or self.cache, **sizes | fields).build(model, eos_ids=(5,))


PAGED = PagedCache.Config(page_size=4, num_pages=14)
WINDOW = ("sliding-window", {"size": 4, "global_every": 2})
MAMBA = {"state_dim": 4, "head_dim": 4, "chunk": 4}
CASES = {
    "contiguous": Case(),
    "contiguous-int8": Case(cache=ContiguousCache.Config(dtype="int8")),
    "paged": Case(cache=PAGED),
    "paged-int8": Case(cache=PAGED.set(dtype="int8")),
    "paged-float8": Case(cache=PAGED.set(dtype="float8_e4m3fn")),
    "ring": Case((WINDOW, ("ring-kv", {"spare": 2}))),
    "ring-paged": Case((WINDOW, ("ring-kv", {"spare": 2})), PAGED),
    "latent-paged": Case(cache=PAGED, is_latent=True),
    "cross-layer-paged": Case((("cross-layer-kv", {"every": 2}),), PAGED),
    "mamba2": Case((("mamba2", MAMBA),)),
    "mamba2-paged": Case((("mamba2", MAMBA | {"attention_every": 2}),), PAGED),
}


def prompts(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [tuple(random.integers(6, VOCAB_SIZE, length).tolist()) for length in lengths]


def requests(lengths, *, priority=0, seed=0):
    """Requests that are sampled greedily and by a seed in turn."""
    return [Request(ids, (GREEDY, SEEDED)[at % 2], priority=priority) for at, ids in enumerate(prompts(lengths, seed))]
