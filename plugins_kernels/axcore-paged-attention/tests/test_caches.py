"""Each cache with each kernel that decodes on a CPU: the log-probabilities are those of training, and those of the
reference kernel if the cache rounds."""

import numpy as np
import pytest

import axcore as ax
from axcore import nn
from axcore.aot.decoding import engine_choices
from axcore.infer import Engine, Request, SamplingOptions
from axcore.plugin import KVCacheOffer, offered, use_text
from axcore.testing.engine import check_logprobs
from axcore.testing.models import VOCAB_SIZE, tiny_model
from axcore_paged_attention.kernel import PagedAttention

WINDOW = 8
EXACT = ("contiguous", "paged-kv:page_size=4", "ring-kv:spare=2")
ROUNDED = (
    "contiguous:dtype=int8",
    "contiguous:dtype=float8_e4m3fn",
    "paged-kv:page_size=4,dtype=int8",
    "paged-kv:page_size=4,dtype=float8_e4m3fn",
    "ring-kv:spare=2,dtype=int8",
)
KERNELS = {"reference": nn.ReferenceKernel.Config(), "paged-attention": PagedAttention.Config(interpret=True)}


def built(kernel, cache):
    """A model with grouped heads, and with a window in each layer for rings, which `kernel` decodes."""
    cfg = ax.pipe(tiny_model(), ax.use("rope"))
    cfg = ax.select(cfg, "embedding").set(init=nn.Normal(stddev=1.0))
    if cache.startswith("ring"):
        cfg = ax.pipe(cfg, ax.use("sliding-window", size=WINDOW), use_text(cache))
    order = nn.ChooseKernel.Config(order=(KERNELS[kernel], KERNELS["reference"]))
    return ax.select(cfg, nn.Attention).put(kernel=order).build(rngs=ax.Rngs(0))


def engine(cache):
    made = nn.ContiguousCache.Config() if cache.startswith("ring") else offered(KVCacheOffer, cache)
    return Engine.Config(cache=made, max_len=32, max_rows=2, step_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cache", EXACT)
def test_exact_caches_give_the_log_probabilities_of_training(cache, kernel):
    check_logprobs(built(kernel, cache), engine(cache), trained=built("reference", cache))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ROUNDED)
def test_caches_that_round_give_those_of_the_reference_kernel(cache):
    random = np.random.default_rng(0)
    options = SamplingOptions(max_tokens=8, seed=1, logprobs=0, prompt_logprobs=True, ignore_eos=True)
    asked = [Request(tuple(random.integers(0, VOCAB_SIZE, length).tolist()), options) for length in (19, 5)]
    found = {}
    for kernel in KERNELS:
        with engine(cache).build(built(kernel, cache)) as running:
            found[kernel] = running.generate(asked)
    for one, other in zip(*found.values(), strict=True):
        assert one.ids == other.ids
        for name in ("logprobs", "prompt_logprobs"):
            pairs = [[each.logprob for each in getattr(piece, name) if each is not None] for piece in (one, other)]
            assert len(pairs[0]) > 3
            np.testing.assert_allclose(*pairs, atol=2e-5)


@pytest.mark.parametrize("cache", (*EXACT, *ROUNDED))
def test_the_kernel_decodes_with_each_of_these_caches(cache):
    """Otherwise, the tests above would compare the reference kernel with itself."""
    choices = engine_choices(built("paged-attention", cache).config, engine(cache), None)
    assert isinstance(choices[0].chosen, PagedAttention), choices[0].refused
