"""The attention calls of an engine in `explain` and `tune`."""

import numpy as np
import pytest

import axcore as ax
from axcore.aot import explain
from axcore.aot.decoding import engine_choices
from axcore.aot.explain import built
from axcore.aot.tune import example, tune
from axcore.infer import Engine
from axcore.infer.speculation import MTP, NGram
from axcore.nn import (
    Attention,
    ContiguousCache,
    FeedForward,
    KernelRequest,
    MultiTokenPrediction,
    ReferenceKernel,
    TransformerLayer,
    TunableKernel,
)
from axcore.nn.attention.formula import dense_attention
from axcore.testing import tiny_model
from axcore_paged_kv.cache import PagedCache

CACHES = {
    "contiguous": ContiguousCache.Config(),
    "contiguous int8": ContiguousCache.Config(dtype="int8"),
    "paged": PagedCache.Config(page_size=4),
    "paged int8": PagedCache.Config(page_size=4, dtype="int8"),
}
SEEN = []
PHASES = ("train", "decode", "prefill")


class Spy(ReferenceKernel):
    """Remembers the requests of every call that is traced."""

    def supports(self, request):
        SEEN.append(request)
        return super().supports(request)


class Wide(TunableKernel):
    """A kernel with one setting, which supports decoding only."""

    class Config(TunableKernel.Config):
        block: ax.PositiveInt | None = None

    uses_dtypes = False

    def supports(self, request):
        return None if request.phase == "decode" else "only decodes"

    def candidates(self, request):
        return ({"block": 4}, {"block": 8})

    def __call__(self, inputs):
        return dense_attention(inputs)


def predicting_model():
    """A model with two modules for multi-token prediction, with other heads than its layers."""
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=24))
    return tiny_model().set(future=(MultiTokenPrediction.Config(layer=layer),) * 2)


def engine(cache, **fields):
    return Engine.Config(cache=CACHES[cache], max_rows=2, max_len=30, step_tokens=20, **fields)


@pytest.mark.long
@pytest.mark.parametrize(
    ("cache", "fields"),
    [
        *((cache, {}) for cache in CACHES),
        ("contiguous", {"speculation": NGram.Config(num_speculative_tokens=2)}),
        ("paged", {"burst_tokens": 60, "speculation": NGram.Config(num_speculative_tokens=50)}),
        ("paged", {"speculation": MTP.Config()}),
        pytest.param(
            "contiguous",
            {"speculation": MTP.Config(num_speculative_tokens=3, cache=CACHES["contiguous int8"])},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_requests_are_those_of_a_warm_engine(cache, fields):
    cfg = ax.select(predicting_model(), Attention).set(kernel=Spy.Config())
    given = engine(cache, **fields)
    listed = [request for choice in engine_choices(cfg, given, None) for request in choice.requests]
    with given.build(cfg.build(rngs=ax.Rngs(0))) as running:
        SEEN.clear()
        running.warm_up(("greedy",))
    assert {request.signature for request in listed} == {request.signature for request in SEEN}
    assert {request.batch for request in listed if request.phase == "decode"} == {2}
    for request in listed:
        inputs = example(request)
        assert KernelRequest.of(inputs) == request
        heads, _ = built(ReferenceKernel.Config(), request)(inputs)
        plain, _ = dense_attention(inputs)
        np.testing.assert_allclose(heads, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"burst_tokens": 60}, r"engine\.burst_tokens=60 requires a cache with pages in every layer"),
        ({"cache": CACHES["paged"], "burst_tokens": 20}, r"engine\.burst_tokens=20 must exceed engine\.step_tokens=20"),
        ({"speculation": MTP.Config()}, r"engine\.speculation: the model has no modules for multi-token prediction"),
    ],
)
def test_an_engine_that_cannot_be_built_is_refused(fields, message):
    with pytest.raises(ax.ConfigError, match=message):
        engine_choices(tiny_model(), engine("contiguous").set(**fields), None)


def test_explain_lists_the_calls_of_an_engine():
    cfg = ax.pipe(tiny_model(), ax.use("kernels", order=("reference",)))
    found = [slot for slot in explain(cfg, engine=engine("paged")).slots if slot.kind == "attention kernel"]
    facts = [
        tuple(word for word in slot.request.split(", ") if word in PHASES or word.startswith(("batch", "query_len")))
        for slot in found
    ]
    assert facts[:2] == [("train", "batch=1", "query_len=128"), ("decode", "batch=2", "query_len=1")]
    assert ("prefill", "batch=1", "query_len=16") in facts[2:] and {phase for phase, *_ in facts[2:]} == {"prefill"}
    assert all("Paged" in slot.request and slot.layers == 2 for slot in found[1:])
    assert all("chosen" in {each.verdict for each in slot.candidates if each.name == "reference"} for slot in found)


def test_explain_lists_the_calls_and_the_cache_of_the_module_that_drafts():
    found = explain(predicting_model(), engine=engine("paged", speculation=MTP.Config())).slots
    calls = {slot.request for slot in found if slot.paths == ("future.0.layer.attention.kernel",)}
    assert len([call for call in calls if "decode" in call and "query_len=2" in call and "num_heads=2" in call]) == 1
    assert not any("decode" in slot.request for slot in found if slot.paths == ("future.1.layer.attention.kernel",))
    chosen = {
        path: [each.name for each in slot.candidates if each.verdict == "chosen"]
        for slot in found
        if slot.kind == "kv cache"
        for path in slot.paths
    }
    assert chosen == {
        "decoder.layers.attention.cache": ["paged-kv"],
        "future.0.layer.attention.cache": ["contiguous"],
        "future.1.layer.attention.cache": [],
    }


@pytest.mark.long
def test_tune_measures_the_calls_of_an_engine():
    order = (Wide.Config(), ReferenceKernel.Config())
    cfg = ax.select(tiny_model(), Attention).set(kernel=ax.nn.ChooseKernel.Config(order=order))
    found = tune(cfg, repeats=1, engine=engine("contiguous"))
    (request,) = {each.request for each in found.timings if each.request.phase == "decode"}
    measured = {
        (each.kernel, *each.settings.values()) for each in found.timings if each.request == request and each.seconds
    }
    assert measured == {("Wide", 4), ("Wide", 8), ("reference",)}
    assert request.signature in found.file().kernels["Wide"]
    assert {each.problem for each in found.timings if each.kernel == "Wide" and each.seconds is None} == {
        "only decodes"
    }


@pytest.mark.long
def test_the_cache_of_the_engine_is_chosen():
    slots = explain(tiny_model(), engine=engine("paged")).slots
    candidates = next(slot.candidates for slot in slots if slot.kind == "kv cache")
    assert [each.name for each in candidates if each.verdict == "chosen"] == ["paged-kv"]
