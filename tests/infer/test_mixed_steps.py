"""Steps that compute rows that decode and several prompts in one call, for every kind of decoding state."""

import dataclasses
import itertools
import queue
import types

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Engine, Request, SamplingOptions, Step
from axcore.infer.engine import loop
from axcore.infer.execution.buckets import Buckets, Shape
from axcore.infer.execution.programs import Programs
from axcore.infer.scheduling.limits import SchedulerLimits
from axcore.infer.speculation import DraftModel, NGram
from axcore.module import functional
from axcore.nn import Attention, ContiguousCache, LatentAttention, ReferenceKernel, Repeat, without_caches
from axcore.testing.models import VOCAB_SIZE, tiny_model
from axcore_paged_kv.cache import PagedCache
from axcore_rope.rotary import Rotary
from axcore_rope.scaling import LongRoPE

MAX_LEN = 80
LENGTHS, OUTPUTS = (1, 9, 40, 3, 20, 33), (3, 8, 6, 3, 5, 4)
CONTIGUOUS, PAGED = ContiguousCache.Config(), PagedCache.Config(page_size=4, num_pages=60)
LATENT = LatentAttention.Config(
    num_heads=4, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, value_dim=3, absorb_up_to=2
)
WINDOWS = (ax.use("sliding-window", size=4, global_every=2), ax.use("ring-kv", spare=2))
MODELS = {
    "latent": (lambda cfg: ax.select(cfg, Attention).map(lambda _, __: LATENT),),
    "cross-layer": (ax.use("rope"), ax.use("cross-layer-kv")),
    "windows": (ax.use("rope"), *WINDOWS),
    "mamba2": (ax.use("mamba2", state_dim=4, head_dim=4, chunk=4),),
    "hybrid": (ax.use("mamba2", state_dim=4, head_dim=4, chunk=4, attention_every=2),),
    "moe": (ax.use("rope"), ax.use("moe", num_experts=4)),
    "differential": (ax.use("rope"), ax.use("diff-attention")),
}


def config(name):
    cfg = ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0))
    cfg = ax.select(cfg, Repeat).set(num_layers=4 if name in ("cross-layer", "hybrid", "windows") else 2)
    return ax.pipe(cfg, *MODELS[name])


def recomputed(cfg, prompts, of_length=False):
    """The greedy tokens of each prompt and their log-probabilities, by recomputing the whole row for each token.

    Args:
        of_length: whether position embeddings depend on the length of the row, which its padding must not change.
    """
    fn, params, state = functional(without_caches(cfg).build(rngs=ax.Rngs(0)))

    @jax.jit
    def scores(row, at):
        places = np.arange(MAX_LEN)[None]
        positions = jax.numpy.minimum(places, at) if of_length else places
        return jax.nn.log_softmax(fn(params, state, row[None], positions=positions)[0][0][0, at])

    for ids, count in zip(prompts, OUTPUTS, strict=True):
        row, tokens, found = np.zeros(MAX_LEN, np.int32), list(ids), []
        for _ in range(count):
            row[: len(tokens)] = tokens
            of_next = scores(row, len(tokens) - 1)
            tokens.append(int(np.argmax(of_next)))
            found.append(float(of_next.max()))
        yield tuple(tokens[len(ids) :]), found


@pytest.fixture
def calls(monkeypatch):
    """The number of rows that decode, and of sequences whose prompts are computed, of each call of a model."""
    counted, logits = [], Programs.logits

    def count(self, call):
        blocks = [
            set() if each is None else set(each.ints[each.ints[:, 1] > 0, 2].tolist())
            for each in (call.decode, call.prefill)
        ]
        counted.append(tuple(map(len, blocks)))
        return logits(self, call)

    monkeypatch.setattr(Programs, "logits", count)
    return counted


def run(model, cache, prompts, **fields):
    """Greedy samples of different lengths, so that requests start while others decode."""
    options = SamplingOptions(temperature=0.0, ignore_eos=True, logprobs=0)
    asked = [
        Request(ids, dataclasses.replace(options, max_tokens=count))
        for ids, count in zip(prompts, OUTPUTS, strict=True)
    ]
    cfg = Engine.Config(**{"cache": cache, "max_len": MAX_LEN, "max_rows": 4, "step_tokens": 512, **fields})
    with cfg.build(model) as engine:
        return engine.generate(asked)


IN_CI = [("latent", PAGED), ("windows", CONTIGUOUS), ("hybrid", PAGED)]
AT_NIGHT = [
    ("latent", CONTIGUOUS),
    ("cross-layer", CONTIGUOUS),
    ("cross-layer", PAGED),
    ("windows", PAGED),
    ("mamba2", CONTIGUOUS),
    ("moe", PAGED),
    ("differential", PAGED),
]


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *(pytest.param(*each, marks=pytest.mark.long) for each in IN_CI),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in AT_NIGHT),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__qualname__.split(".")[0],
)
def test_mixed_steps_equal_full_recomputation(name, cache, calls):
    cfg, random = config(name), np.random.default_rng(0)
    prompts = [tuple(random.integers(0, VOCAB_SIZE, length).tolist()) for length in LENGTHS]
    found = run(cfg.build(rngs=ax.Rngs(0)), cache, prompts, step_tokens=64 if cache is PAGED else 512)
    for piece, (ids, scores) in zip(found, recomputed(cfg, prompts), strict=True):
        assert piece.ids == ids
        np.testing.assert_allclose([each.logprob for each in piece.logprobs], scores, atol=1e-4)
    assert any(decode and prefill for decode, prefill in calls), "no step was mixed"


@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_results_do_not_depend_on_the_rows_of_a_step(dtype, calls):
    model, random = ax.pipe(config("moe")).build(rngs=ax.Rngs(0)), np.random.default_rng(1)
    prompts = [tuple(random.integers(0, VOCAB_SIZE, length).tolist()) for length in LENGTHS]
    cache = PAGED.set(dtype=dtype)
    together = run(model, cache, prompts, step_tokens=64)
    assert any(decode and prefill > 1 for decode, prefill in calls), "no step was mixed with two prompts"
    calls.clear()
    alone = run(model, cache, prompts, max_rows=1, step_tokens=MAX_LEN)
    assert not any(decode and prefill for decode, prefill in calls)
    for left, right in zip(together, alone, strict=True):
        assert left.ids == right.ids
        left, right = ([each.logprob for each in piece.logprobs] for piece in (left, right))
        np.testing.assert_allclose(left, right, atol=1e-4)


@pytest.mark.long
def test_a_burst_changes_the_steps_and_no_token(calls, monkeypatch):
    """The prompts of four rows with 20 tokens each are more than two steps of 36. The engine waits for the last of
    them: its clock is read once before it waits and once for each prompt after the first."""
    clock = itertools.chain(range(len(OUTPUTS)), itertools.count(100, 100))
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(loop, "GATHERING_SECONDS", len(OUTPUTS) - 0.5)
    monkeypatch.setattr(loop, "PAUSE_SECONDS", 600)
    model, random = ax.pipe(tiny_model(), ax.use("rope")).build(rngs=ax.Rngs(0)), np.random.default_rng(2)
    prompts = [tuple(random.integers(0, VOCAB_SIZE, 20).tolist()) for _ in OUTPUTS]
    found = []
    for burst_tokens in (None, 36):
        calls.clear()
        found.append(run(model, PAGED, prompts, step_tokens=16, burst_tokens=burst_tokens))
        is_burst = burst_tokens is not None
        assert (max(prefill for _, prefill in calls) > 1) == is_burst == (calls[0][1] > 1), calls
    assert next(clock) >= 100, "the engine did not wait for all prompts"
    assert [piece.ids for piece in found[0]] == [piece.ids for piece in found[1]]
    with pytest.raises(ax.ConfigError, match=r"engine\.burst_tokens=36 requires a cache with pages"):
        run(model, ContiguousCache.Config(), prompts, step_tokens=16, burst_tokens=36)
    with pytest.raises(ax.ConfigError, match=r"engine\.burst_tokens=16 must exceed engine\.step_tokens=16"):
        run(model, PAGED, prompts, step_tokens=16, burst_tokens=16)


def test_a_step_with_prompts_is_one_call(calls):
    """Two prompts that arrive while a third request decodes share one call, in parts with pages."""
    model = ax.pipe(tiny_model(), ax.use("rope")).build(rngs=ax.Rngs(0))
    cfg = Engine.Config(cache=PAGED, max_len=MAX_LEN, max_rows=4, step_tokens=64)
    with cfg.build(model) as engine:
        ended, short = queue.SimpleQueue(), SamplingOptions(max_tokens=1)

        def begun(piece):  # in the engine's thread, so that both arrive before the next step
            if len(calls) == 2:
                for size in (30, 20):
                    engine.submit(Request((size,) * size, short), ended.put)

        engine.submit(Request((1, 2, 3), SamplingOptions(max_tokens=6, ignore_eos=True)), begun)
        assert [ended.get(timeout=300).finish_reason for _ in range(2)] == ["length"] * 2
    assert (1, 2) in calls


def test_shapes_hold_every_step():
    """Every step that a scheduler plans fits: with parts into one call, otherwise its first chunk does."""
    assert Buckets.of(8, 512, 1024, None, 1, has_parts=False) == Buckets(
        (8,),
        tuple(Shape(1, width) for width in (16, 64, 256, 512)),
        (Shape(2, 64), Shape(1, 512)),
        (16, 64, 256, 512),
        (),
        None,
    )
    paged = Buckets.of(8, 512, 1024, 64, 2, has_parts=True)
    assert paged.prompts == ((1, 16), (1, 64), (2, 128), (4, 128)) and paged.mixed == paged.prompts[2:]
    assert (paged.rows, paged.pages, paged.part) == ((1, 4, 8), (16, 64), 128)
    for max_rows, rows in {1: (1,), 3: (1, 3), 16: (1, 4, 16), 24: (1, 4, 16, 24), 64: (1, 4, 16, 32, 64)}.items():
        assert Buckets.of(max_rows, 512, 1024, 64, 1, has_parts=True).rows == rows
    burst = Buckets.of(8, 512, 1024, 64, 2, has_parts=True, burst_tokens=2000)
    assert burst.prompts == (*paged.prompts, (16, 128)) and burst.mixed == paged.mixed and burst.widths[-1] == 1024
    assert paged.fit([1, 128, 255], mixed=True) == (3, (4, 128)) and paged.fit([64], mixed=True) == (1, (2, 128))
    random = np.random.default_rng(0)
    for step_tokens in (1, 5, 16, 20, 64, 100, 512, 1000):
        for has_parts in (False, True):
            buckets = Buckets.of(4, step_tokens, 300, 20 if has_parts else None, 1, has_parts=has_parts)
            for mixed in (False, True):
                left, counts, part = step_tokens, [], buckets.part or 1
                while left > 0:
                    counts.append(int(random.integers(1, min(left, 300) + 1)))
                    left -= -(-counts[-1] // part) * part
                number, (rows, width) = buckets.fit(counts, mixed=mixed)
                assert number == len(counts) if has_parts else number >= 1 and width >= max(counts[:number])
                assert rows * width >= sum(counts[:number])


class Reporting(ReferenceKernel):
    """A kernel that reports values, as one that counts overflow does."""

    class Config(ReferenceKernel.Config):
        pass

    def __call__(self, inputs):
        self.add_summary("queries", inputs.q.shape[0] * inputs.q.shape[1], ax.Reduce.SUM)
        return super().__call__(inputs)


class ReportingCache(ContiguousCache):
    class Config(ContiguousCache.Config):
        pass

    def __call__(self, inputs):
        self.add_summary("width", inputs.q.shape[1], ax.Reduce.MAX)
        return super().__call__(inputs)


class ReportingPosition(Rotary):
    class Config(Rotary.Config):
        pass

    def __call__(self, q, k, *positions):
        self.add_summary("rows", q.shape[0], ax.Reduce.MIN)
        return super().__call__(q, k, *positions)


def test_kernels_caches_and_positions_report_values_for_all_blocks_of_a_step():
    filled = {"kernel": Reporting.Config(), "position": ReportingPosition.Config(), "cache": ReportingCache.Config()}
    cfg = ax.select(tiny_model(), Attention).set(**filled)
    cfg = ax.select(cfg, Repeat).set(num_layers=1)
    decoder, params, state = Decoder.of(cfg.build(rngs=ax.Rngs(0)), cache=CONTIGUOUS, batch_size=3, max_len=16)
    reports = []

    def watched(*args, **kwargs):
        (logits, reported), state = decoder.fn(*args, **kwargs)
        reports.append(set(reported.summaries))
        return (logits, reported), state

    tokens = Step(np.ones((2, 1), np.int32), np.zeros(2, np.int32), slots=np.array([0, 1], np.int32))
    prompt = Step(np.ones((1, 5), np.int32), np.zeros(1, np.int32), slots=np.array([2], np.int32))
    jax.eval_shape(dataclasses.replace(decoder, fn=watched), params, state, (tokens, prompt))
    layer = "decoder.layers.0.attention"
    assert reports == [{f"{layer}.position.rows", f"{layer}.cache.width", f"{layer}.kernel.queries"}]


@pytest.mark.parametrize(
    ("cache", "speculation"),
    [
        pytest.param(PAGED, None, marks=pytest.mark.long),
        pytest.param(CONTIGUOUS, None, marks=pytest.mark.slow),
        pytest.param(CONTIGUOUS, NGram.Config(prompt_lookup_min=1), marks=pytest.mark.slow),
    ],
    ids=["paged", "contiguous", "drafts"],
)
def test_rows_pass_a_length_above_which_their_keys_change(cache, speculation, calls):
    """LongRoPE in a batch: prompts shorter and longer than the length, and rows that pass it while others decode."""
    long = LongRoPE(short=(1.0, 1.0), long=(2.0, 3.0), original_max=12)
    cfg = ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0))
    cfg, random = ax.pipe(cfg, ax.use("rope", scaling=long)), np.random.default_rng(0)
    prompts = [tuple(random.integers(0, VOCAB_SIZE, length).tolist()) for length in (1, 9, 11, 12, 13, 33)]
    found = run(cfg.build(rngs=ax.Rngs(0)), cache, prompts, step_tokens=16, speculation=speculation)
    for piece, (ids, scores) in zip(found, recomputed(cfg, prompts, of_length=True), strict=True):
        assert piece.ids == ids
        np.testing.assert_allclose([each.logprob for each in piece.logprobs], scores, atol=1e-4)
    assert speculation or any(decode and prefill for decode, prefill in calls), "no step was mixed"


def test_engines_that_cannot_compute_a_row_again_are_refused():
    long = LongRoPE(short=(1.0, 1.0), long=(2.0, 3.0), original_max=12)
    model = ax.use("rope", scaling=long)(tiny_model()).build(rngs=ax.Rngs(0))
    cfg = Engine.Config(max_len=20, max_rows=2, step_tokens=12)
    with pytest.raises(ax.ConfigError, match=r"step_tokens=12: the keys .* Set step_tokens to at least 13, or max_len"):
        cfg.build(model)
    with pytest.raises(ax.ConfigError, match=r"prefix_caching=True: the keys of a row change when it passes 12 tokens"):
        cfg.set(step_tokens=13, prefix_caching=True, cache=PAGED).build(model)
    plain, drafter = ax.use("rope")(tiny_model()).build(rngs=ax.Rngs(0)), DraftModel.Config()
    with pytest.raises(ax.ConfigError, match="the keys of the draft model change when a row passes 12 tokens"):
        cfg.set(speculation=drafter).build(plain, draft_model=model)
    with pytest.raises(ax.ConfigError, match=r"engine.step_tokens=4: .* Set step_tokens to at least 6"):
        SchedulerLimits(2, 20, 4, recompute_above=(5, 20))


def test_position_embeddings_see_the_length_of_each_row():
    """One row is longer than `recompute_above`, where its keys differ from those of the short row beside it."""
    long = LongRoPE(short=(1.0, 1.0), long=(2.0, 3.0), original_max=8)
    cfg = ax.pipe(tiny_model(), ax.use("rope", scaling=long))
    decoder, params, empty = Decoder.of(cfg.build(rngs=ax.Rngs(0)), cache=CONTIGUOUS, batch_size=2, max_len=16)
    assert decoder.recompute_above == (8,)
    step, ids = jax.jit(decoder.__call__), jax.random.randint(jax.random.key(1), (2, 16), 0, VOCAB_SIZE)
    begun = Step(ids[:1, :12], np.zeros(1, np.int32), slots=np.array([0], np.int32))
    _, state = step(params, empty, begun)
    decode = Step(ids[:1, 12:13], np.array([12], np.int32), slots=np.array([0], np.int32))
    prefill = Step(ids[1:, :5], np.zeros(1, np.int32), slots=np.array([1], np.int32))
    (long_row, short_row), _ = step(params, state, (decode, prefill))
    np.testing.assert_allclose(long_row, step(params, state, decode)[0], atol=1e-5)
    np.testing.assert_allclose(short_row, step(params, state, prefill)[0], atol=1e-5)
