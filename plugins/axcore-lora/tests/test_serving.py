"""Rows of one batch use different adapters, and each equals the model with its adapter merged."""

import concurrent.futures
import queue
import time
from contextlib import ExitStack

import jax
import numpy as np
import pytest

import axcore as ax
import axcore_lora
from axcore.config import AxcoreError, ConfigError
from axcore.infer import Decoder, Engine, Piece, Request, SamplingOptions, Step
from axcore.infer.speculation import MTP
from axcore.module import functional
from axcore.nn import ContiguousCache, LatentAttention, MultiTokenPrediction
from axcore.numerics import stored
from axcore.parallel import Mesh
from axcore.testing.devices import on_devices
from axcore.testing.models import VOCAB_SIZE, tiny_model
from axcore_lora import Adapter, LoRAAdapters
from axcore_paged_kv.cache import PagedCache

pytestmark = pytest.mark.long
MAX_LEN = 48
GREEDY = SamplingOptions(temperature=0.0, max_tokens=9, logprobs=0, ignore_eos=True)
CACHES = {"contiguous": {}, "paged": {"cache": PagedCache.Config(page_size=4, num_pages=40)}}
ROOM = LoRAAdapters.Config(max_adapters=2, max_rank=4)
BASE = ax.pipe(ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0)), ax.use("rope"))


def adapter(rank, seed, base=BASE, **options):
    """An adapter of every linear layer that changes the model."""
    cfg = ax.pipe(base, ax.use("lora", rank=rank, **options))
    shapes = axcore_lora.adapters(functional(cfg.build(rngs=ax.Rngs(0)))[1])
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = [0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return Adapter(cfg, structure.unflatten(arrays))


A, B = adapter(4, 1), adapter(2, 2, alpha=3.0)


@pytest.fixture(scope="module")
def model():
    return BASE.build(rngs=ax.Rngs(0))


@pytest.fixture(scope="module")
def logprobs(model):
    """The log-probabilities of the model with an adapter merged into its weights, [tokens, vocab]."""
    params = functional(model)[1]
    fns = {}

    def of(given, ids):
        if given not in fns:
            cfg, held = BASE, params
            if given is not None:
                cfg, held, _ = axcore_lora.merge(given.cfg, axcore_lora.load(params, given.params))
            fn, _, state = functional(cfg.build(rngs=ax.Rngs(0)))
            fns[given] = jax.jit(lambda row: jax.nn.log_softmax(fn(held, state, row[None])[0][0][0]))
        row = np.zeros(MAX_LEN, np.int32)
        row[: len(ids)] = ids
        return np.asarray(fns[given](row))[: len(ids)]

    return of


def started(model, layout=None, **fields):
    fields = {"max_len": MAX_LEN, "max_rows": 4, "step_tokens": 20, "adapters": ROOM, **fields}
    return Engine.Config(**fields).build(model, layout=layout)


@pytest.fixture(scope="module", params=CACHES)
def engine(request, model):
    with started(model, **CACHES[request.param]) as engine:
        engine.load_adapter("a", A)
        engine.load_adapter("b", B)
        yield engine


@pytest.fixture
def fresh(model):
    """An engine whose adapters a test may change."""
    with started(model, **CACHES["paged"]) as engine:
        yield engine


def prompts(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [tuple(random.integers(6, VOCAB_SIZE, length).tolist()) for length in lengths]


def check(piece, request, given, logprobs):
    """The tokens are the most likely, and have the log-probabilities, of the merged model."""
    row = [*request.ids, *piece.ids]
    expected = logprobs(given, row)[len(request.ids) - 1 : -1]
    found = np.array([each.logprob for each in piece.logprobs])
    np.testing.assert_allclose(found, expected[np.arange(len(found)), list(piece.ids)], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found, expected.max(-1), rtol=1e-5, atol=1e-5)


def test_rows_of_one_batch_equal_the_models_with_merged_adapters(engine, logprobs):
    names = ("a", None, "b", "a", "b", None, "a")
    asked = [
        Request(ids, GREEDY, adapter=name) for ids, name in zip(prompts((5, 9, 3, 30, 20, 38, 1)), names, strict=True)
    ]
    found = engine.generate(asked)
    for piece, request in zip(found, asked, strict=True):
        check(piece, request, {"a": A, "b": B, None: None}[request.adapter], logprobs)


def test_one_prompt_differs_between_adapters_and_shares_no_pages(engine, logprobs):
    (ids,) = prompts((17,), seed=1)
    asked = [Request(ids, GREEDY, adapter=name) for name in ("a", "b", None)]
    before = engine.stats.cached_tokens
    found = [engine.generate([request])[0] for request in asked]
    assert engine.stats.cached_tokens == before
    assert len({piece.ids for piece in found}) == 3
    for piece, request, given in zip(found, asked, (A, B, None), strict=True):
        check(piece, request, given, logprobs)
    again = [engine.generate([request])[0].ids for request in asked]
    assert again == [piece.ids for piece in found]
    assert engine.stats.pages is None or engine.stats.cached_tokens - before == 3 * 16


def test_prompts_are_scored_by_their_adapter(engine, logprobs):
    (ids,) = prompts((26,), seed=2)
    for name, given in (("b", B), (None, None), ("a", A)):
        scores = [each.logprob for each in engine.score([ids], adapter=name)[0]]
        np.testing.assert_allclose(scores, logprobs(given, ids)[np.arange(25), ids[1:]], rtol=1e-5, atol=1e-5)


def test_preempted_rows_keep_their_adapters(model, logprobs):
    with started(model, cache=PagedCache.Config(page_size=4, num_pages=14), max_len=40) as engine:
        engine.load_adapter("a", A)
        engine.load_adapter("b", B)
        options = SamplingOptions(temperature=0.0, max_tokens=20, logprobs=0, ignore_eos=True)
        asked = [
            Request(ids, options, adapter=name)
            for ids, name in zip(prompts((9, 11, 6, 8), seed=3), ("a", "b", None, "a"), strict=True)
        ]
        found = engine.generate(asked)
        assert engine.stats.preempted
        for piece, request in zip(found, asked, strict=True):
            check(piece, request, {"a": A, "b": B, None: None}[request.adapter], logprobs)


def test_nothing_compiles_when_adapters_come_and_go(fresh, logprobs):
    fresh.warm_up(("greedy",))
    compiled, (ids,) = fresh.stats.compiled, prompts((9,))
    for name, given in (("a", A), ("b", B), ("a", B), ("b", A)):
        fresh.load_adapter(name, given)
        request = Request(ids, GREEDY, adapter=name)
        check(fresh.generate([request])[0], request, given, logprobs)
    assert fresh.adapters == ("a", "b")
    fresh.unload_adapter("a")
    assert fresh.adapters == ("b",)
    assert fresh.stats.compiled == compiled


def test_a_new_version_shares_no_pages_with_the_old(fresh, logprobs):
    (ids,) = prompts((17,), seed=4)
    request = Request(ids, GREEDY, adapter="a")
    for given in (A, B, A):
        fresh.load_adapter("a", given)
        check(fresh.generate([request])[0], request, given, logprobs)
    assert fresh.stats.cached_tokens == 0


def test_running_requests_keep_the_version_that_they_started_with(fresh, logprobs):
    fresh.load_adapter("a", A)
    (ids,) = prompts((5,), seed=5)
    running, newer = (
        Request(ids, SamplingOptions(temperature=0.0, max_tokens=most, logprobs=0, ignore_eos=True), adapter="a")
        for most in (30, 9)
    )
    actions = [
        lambda: fresh.load_adapter("a", B),  # in the other slot
        lambda: fresh.load_adapter("c", A),
        lambda: fresh.stream(newer),
        lambda: fresh.unload_adapter("a"),
        lambda: fresh.load_adapter("c", A),
    ]
    pieces, done = queue.SimpleQueue(), []

    def deliver(piece):  # blocks the engine until an action has reached it
        pieces.put(piece)
        if actions:
            done.append(pool.submit(actions.pop(0)))
            while fresh._loop._inbox.empty():
                time.sleep(0.001)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        fresh.submit(running, deliver)
        found = [pieces.get(timeout=120) for _ in range(30)]
        done[0].result(), done[3].result()
        for refused in (done[1], done[4]):
            with pytest.raises(AxcoreError, match=r"adapter 'c': running requests still use .*max_adapters=2"):
                refused.result()
        check(done[2].result().result(), newer, B, logprobs)
    whole = Piece(tuple(id for each in found for id in each.ids), logprobs=tuple(each.logprobs[0] for each in found))
    check(whole, running, A, logprobs)
    with pytest.raises(ConfigError, match=r"request.adapter='a' is not loaded; the engine has no adapter"):
        fresh.generate([newer])
    for name in ("c", "d"):
        fresh.load_adapter(name, A)


def test_a_request_whose_adapter_is_unloaded_before_it_starts_gets_an_error(fresh):
    fresh.load_adapter("a", A)
    checked = fresh.check
    fresh.check = lambda request: (checked(request), fresh.unload_adapter("a"))
    with pytest.raises(ConfigError, match=r"request.adapter='a' is not loaded"):
        fresh.generate([Request((6, 7), GREEDY, adapter="a")])
    assert fresh.stats.running == fresh.stats.waiting == 0


def test_adapters_that_do_not_fit_are_named(fresh):
    fresh.load_adapter("sql", A)
    fresh.load_adapter("chat", B)
    with pytest.raises(ConfigError, match=r"max_adapters=2 adapters are loaded: 'sql', 'chat'. Unload one before 'c'"):
        fresh.load_adapter("c", A)
    with pytest.raises(ConfigError, match=r"request.adapter='spl' is not loaded; .* Did you mean 'sql'\?"):
        fresh.check(Request((6,), adapter="spl"))
    with pytest.raises(ConfigError, match=r"request.adapter='c' is not loaded; the engine has 'sql', 'chat'"):
        fresh.unload_adapter("c")
    with pytest.raises(ConfigError, match=r"has rank 8, but engine.adapters.max_rank=4. Set max_rank to at least 8"):
        fresh.load_adapter("sql", adapter(8, 1))
    with pytest.raises(ConfigError, match=r"an adapter must be a folder or an axcore_lora.Adapter, not 3"):
        fresh.load_adapter("sql", 3)
    with pytest.raises(AxcoreError, match=r"has a DoRA adapter.* Merge it"):
        fresh.load_adapter("sql", adapter(2, 1, dora=True))
    with pytest.raises(AxcoreError, match=r"values that are not finite in float32"):
        fresh.load_adapter("sql", Adapter(A.cfg, jax.tree.map(lambda x: x * np.nan, A.params)))
    with pytest.raises(AxcoreError, match=r"has a of shape \[48, 4\], but the model expects \[24, 4\]"):
        fresh.load_adapter("sql", adapter(4, 1, ax.select(BASE, ax.nn.FeedForward).set(hidden_dim=48)))
    with pytest.raises(ConfigError, match="the name of an adapter must be a text, not ''"):
        fresh.load_adapter("", A)
    assert fresh.adapters == ("sql", "chat")


def test_models_without_room_for_adapters_are_refused():
    own = ax.pipe(BASE, ax.use("lora")).build(rngs=ax.Rngs(0))
    with pytest.raises(ConfigError, match=r"model\..* already has an adapter. Serve the base model, merge"):
        started(own)
    with pytest.raises(ConfigError, match=r"where=\('nothing',\) .* leave no linear layer"):
        started(BASE.build(rngs=ax.Rngs(0)), adapters=LoRAAdapters.Config(where=("nothing",)))


def test_an_adapter_of_some_layers_leaves_the_others(model, logprobs):
    some = adapter(4, 6, where="decoder.layers.attention.**")
    with started(model, adapters=ROOM.set(where=("decoder.**.attention.**",))) as engine:
        engine.load_adapter("some", some)
        request = Request(prompts((9,))[0], GREEDY, adapter="some")
        check(engine.generate([request])[0], request, some, logprobs)
        with pytest.raises(AxcoreError, match=r"changes .*, for which the engine has no room"):
            engine.load_adapter("all", A)


@pytest.mark.parametrize("numerics", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_adapters_of_quantized_weights(numerics):
    """Equal the same quantized weights with the adapter attached, since merging would round the sum."""
    wide = ax.select(BASE.set(dim=32), ax.nn.FeedForward).set(hidden_dim=64)
    given = adapter(4, 1, wide)
    cfg = ax.pipe(wide, ax.use(numerics, where=ax.nn.Linear))
    quantized, params = stored(cfg, functional(wide.build(rngs=ax.Rngs(0)))[1])
    base = functional(quantized.build(rngs=ax.Rngs(0)))[0].bind(params, {})
    with started(base, **CACHES["paged"]) as engine:
        engine.load_adapter("a", given)
        asked = [Request(ids, GREEDY, adapter=name) for ids, name in zip(prompts((5, 23)), ("a", None), strict=True)]
        found = engine.generate(asked)
    for piece, request in zip(found, asked, strict=True):
        whole, held = quantized, params
        if request.adapter:
            whole, held = ax.pipe(quantized, ax.use("lora", rank=4)), axcore_lora.load(params, given.params)
        fn, _, state = functional(whole.build(rngs=ax.Rngs(0)))
        row = np.array([[*request.ids, *piece.ids]])
        expected = np.asarray(jax.nn.log_softmax(fn(held, state, row)[0][0][0]))[len(request.ids) - 1 : -1]
        scores = [each.logprob for each in piece.logprobs]
        np.testing.assert_allclose(scores, expected[np.arange(len(scores)), list(piece.ids)], rtol=1e-4, atol=1e-4)


def test_handovers_between_engines_have_the_weights_of_the_adapter(model):
    """The engines differ in their room and slots, and the decoding engine has two wrong adapters."""
    flat, structure = jax.tree.flatten(A.params)
    near = Adapter(A.cfg, structure.unflatten([*flat[:-1], flat[-1].at[-1, -1].add(0.5)]))
    wide = LoRAAdapters.Config(max_adapters=4, max_rank=6)
    ids = prompts((7,))[0]
    with started(model, adapters=wide) as prefill, started(model) as alone, ExitStack() as stack:
        for name, given in (("b", B), ("near", near), ("swapped", B), ("a", A)):
            prefill.load_adapter(name, given)
        decoding = stack.enter_context(
            Engine.Config(max_len=MAX_LEN, max_rows=4, step_tokens=20, adapters=LoRAAdapters.Config(max_rank=5)).build(
                model, prefill=prefill
            )
        )
        for name, given in (("a", A), ("near", A), ("swapped", A)):
            decoding.load_adapter(name, given)
        alone.load_adapter("a", A)
        for name in ("a", None):
            request = Request(ids, GREEDY, adapter=name)
            assert decoding.generate([request])[0].ids == alone.generate([request])[0].ids
        for name in ("near", "swapped"):
            with pytest.raises(ConfigError, match=rf"handover: request.adapter='{name}' has the weights \w{{16}} in"):
                decoding.generate([Request(ids, GREEDY, adapter=name)])
        decoding.unload_adapter("a")
        decoding.load_adapter("b", B)
        request = Request(ids, GREEDY, adapter="b")
        assert len(decoding.generate([request])[0].ids) == 9


@pytest.mark.parametrize("unstack", [True, False])
def test_a_decoder_with_a_row_for_each_adapter(model, logprobs, unstack):
    adapters = ROOM.build()
    decoder, params, state = Decoder.of(
        model, cache=ContiguousCache.Config(), batch_size=3, max_len=MAX_LEN, adapters=adapters, unstack=unstack
    )
    if unstack:
        for slot, given in enumerate((A, B)):
            arrays = adapters.arrays(given, BASE, state["model"])
            state["model"] = adapters.write(state["model"], arrays, np.int32(slot))
    ids = np.array([prompts((7,))[0]] * 3)
    slots = np.array([1, -1, 0])
    found, state = decoder(params, state, Step(ids, start=np.zeros(3, np.int32), adapters=slots))
    expected = [B, None, A] if unstack else [None] * 3  # the slots of a scanned stack are empty here
    for row, given in zip(np.asarray(jax.nn.log_softmax(found)), expected, strict=True):
        np.testing.assert_allclose(row, logprobs(given, ids[0]), rtol=1e-5, atol=1e-5)


def on_eight_devices_and_one():
    model = BASE.build(rngs=ax.Rngs(0))
    rules = {"batch": "data", "head": "tensor", "kv_head": "tensor", "mlp": "tensor", "vocab": "tensor"}
    layout = Mesh(shape={"data": 4, "tensor": 2}, rules=rules).make()
    found = []
    for each in (layout, None):
        with started(model, layout=each) as engine:
            engine.warm_up(("greedy",))
            compiled = engine.stats.compiled
            engine.load_adapter("a", A)
            engine.load_adapter("b", B)
            asked = [
                Request(ids, GREEDY, adapter=name)
                for ids, name in zip(prompts((5, 9, 30, 2)), ("a", "b", None, "a"), strict=True)
            ]
            pieces = engine.generate(asked)
            found.append([(piece.ids, [each.logprob for each in piece.logprobs]) for piece in pieces])
            assert engine.stats.compiled == compiled
    return found


@pytest.mark.slow
def test_adapters_on_eight_devices():
    for (ids, scores), (alone, expected) in zip(*on_devices(on_eight_devices_and_one), strict=True):
        assert ids == alone
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def test_layers_of_other_rows_than_the_tokens_are_named_and_can_be_excluded():
    latent = LatentAttention.Config(num_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, value_dim=8)
    cfg = ax.pipe(
        ax.select(tiny_model(), ax.nn.Attention).swap(latent, drop=("num_heads", "num_kv_heads")), ax.use("rope")
    )
    model = cfg.build(rngs=ax.Rngs(0))
    with pytest.raises(ConfigError, match=r"exclude=\('\*\*.key_up',\)"):
        started(model)
    with started(model, adapters=ROOM.set(exclude=("**.key_up", "**.value_up"))) as engine:
        given = adapter(2, 1, cfg, where="decoder.layers.ffn.**")
        engine.load_adapter("a", given)
        first, second = engine.generate([Request((6, 7), GREEDY, adapter=name) for name in ("a", None)])
        assert first.ids != second.ids


def test_experts_are_left_out():
    cfg = ax.pipe(BASE, ax.use("moe", num_experts=4, top_k=2))
    with started(cfg.build(rngs=ax.Rngs(0))) as engine:
        engine.load_adapter("attention", adapter(2, 1, cfg, where="decoder.layers.attention.**"))
        with pytest.raises(AxcoreError, match=r"has adapters of experts, which an engine cannot choose"):
            engine.load_adapter("all", adapter(2, 1, cfg))


def test_an_adapter_folder_has_only_the_adapters(model, tmp_path, logprobs):
    params = axcore_lora.load(functional(model)[1], A.params)
    ax.train.save_model(tmp_path / "model", A.cfg, params)
    Adapter.read(tmp_path / "model").save(tmp_path / "adapter")
    num_bytes = [
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        for name in ("model", "adapter")
    ]
    assert num_bytes[1] < num_bytes[0]
    with started(model) as engine:
        for name in ("model", "adapter"):
            engine.load_adapter(name, tmp_path / name)
            request = Request(prompts((9,))[0], GREEDY, adapter=name)
            check(engine.generate([request])[0], request, A, logprobs)
        with pytest.raises(AxcoreError, match="no-such is not a model folder") as found:
            engine.load_adapter("c", tmp_path / "no-such")
        assert found.value.__notes__ == ["while loading the adapter 'c'"]
    ax.train.save_model(tmp_path / "base", BASE, functional(model)[1])
    with pytest.raises(AxcoreError, match=r"base has no adapters. Give the folder of a run"):
        Adapter.read(tmp_path / "base")


@pytest.mark.parametrize("speculation", [None, MTP.Config(num_speculative_tokens=2)], ids=["plain", "mtp"])
def test_what_an_adapter_changes_in_layers_of_training_only_has_no_effect(speculation):
    """An adapter of a model with multi-token prediction."""
    base = BASE.set(future=(MultiTokenPrediction.Config(layer=BASE.decoder.layers),))
    model, given = base.build(rngs=ax.Rngs(0)), adapter(4, 1, base)
    assert "future" in given.params
    cfg, params, _ = axcore_lora.merge(given.cfg, axcore_lora.load(functional(model)[1], given.params))
    fn, _, state = functional(cfg.build(rngs=ax.Rngs(0)))
    whole = jax.jit(lambda row: jax.nn.log_softmax(fn(params, state, row[None])[0][0][0]))
    with started(model, speculation=speculation) as engine:
        engine.load_adapter("a", given)
        asked = [Request(ids, GREEDY, adapter="a") for ids in prompts((5, 21))]
        for piece, request in zip(engine.generate(asked), asked, strict=True):
            row = np.zeros(MAX_LEN, np.int32)
            row[: len(request.ids) + 9] = *request.ids, *piece.ids
            check(piece, request, None, lambda _, ids, row=row: whole(row)[: len(ids)])
