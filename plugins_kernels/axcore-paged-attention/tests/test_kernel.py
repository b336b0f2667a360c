"""`PagedAttention`: supported requests, settings, and models that decode with it."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.aot.targets import Target
from axcore.infer import Decoder, Step
from axcore.module import functional
from axcore.nn import (
    Attention,
    Causal,
    ChooseKernel,
    Contiguous,
    ContiguousCache,
    InCache,
    Paged,
    ReferenceKernel,
    SlidingWindow,
    Tuning,
    refusal,
)
from axcore.nn.choosing import recording
from axcore.parallel import Mesh
from axcore.testing import tiny_model, training_request
from axcore.testing.devices import on_devices
from axcore_paged_attention.kernel import PagedAttention
from axcore_paged_kv.cache import PagedCache

from . import eight_devices

WELL = training_request(
    "gpu",
    "NVIDIA H100 80GB HBM3",
    batch=64,
    query_len=1,
    key_len=1024,
    num_heads=32,
    num_kv_heads=32,
    packed=False,
    partial=True,
    aligned=False,
    phase="decode",
    training=False,
    view=Paged,
    page_size=16,
)


def built(**fields) -> PagedAttention:
    return PagedAttention.Config(head_dim=128, **fields).build(rngs=ax.Rngs(0))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query_len": 8},
        {"phase": "prefill", "query_len": 128},
        {"num_kv_heads": 1},
        {"dtype": np.dtype(np.float32)},
        {"codes": np.dtype(np.int8)},
        {"codes": np.dtype(jnp.float8_e4m3fn)},
        {"head_dim": 192, "value_dim": 80},
        {"options": ("softcap", "sinks", "lse")},
        {"mask": Causal() & SlidingWindow(size=4)},
        {"view": InCache, "page_size": None},
        {"view": Contiguous, "page_size": None},
        {"device_kind": "NVIDIA A100-SXM4-80GB"},
        {"device_kind": "NVIDIA B200"},
    ],
    ids=str,
)
def test_supported_requests(changes):
    assert refusal(built(), dataclasses.replace(WELL, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu"}, "requires an NVIDIA GPU, got cpu"),
        ({"platform": "tpu"}, "requires an NVIDIA GPU, got tpu"),
        ({"phase": "train"}, "has no backward pass"),
        ({"query_len": 129}, "supports max_queries=128 queries per row, got 129"),
        ({"dtype": np.dtype(np.float64)}, "not float64"),
        ({"head_dim": 576}, "requires a head_dim from 1 to 256, got 576"),
        ({"value_dim": 512}, "requires a value_dim from 1 to 256, got 512"),
        ({"codes": np.dtype(jnp.float8_e5m2)}, "reads int8 and float8_e4m3fn codes, not float8_e5m2"),
        (
            {"codes": np.dtype(jnp.float8_e4m3fn), "device_kind": "NVIDIA A100-SXM4-80GB"},
            "requires a GPU with float8 numbers",
        ),
        ({"options": ("bias", "dropout")}, "does not take bias and dropout"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_unsupported_requests_have_a_reason(changes, reason):
    assert reason in refusal(built(), dataclasses.replace(WELL, **changes))


def test_the_interpreter_runs_only_on_cpus():
    assert refusal(built(interpret=True), dataclasses.replace(WELL, platform="cpu")) is None
    assert "interpret=True is for tests on a CPU" in refusal(built(interpret=True), WELL)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"block": 8}, "block=8 is not a power of two from 16 to 256"),
        ({"block": 48}, "block=48 is not a power of two"),
        ({"num_warps": 3}, "num_warps=3 is not a power of two from 1 to 16"),
        ({"dot_rows": 3}, "dot_rows=3 is not 1 or 2"),
    ],
    ids=str,
)
def test_invalid_settings(fields, problem):
    with pytest.raises(ax.ConfigError, match=problem):
        built(**fields)


def test_settings_are_tunable():
    default, *others = built().candidates(WELL)
    assert default == {"block": 64, "splits": 2, "dot_rows": 1, "num_warps": 4, "num_stages": 2}
    coded = next(built().candidates(dataclasses.replace(WELL, codes=np.dtype(np.int8))))
    assert coded == {"block": 16, "splits": 2, "dot_rows": 2, "num_warps": 4, "num_stages": 2}
    assert len({tuple(each.items()) for each in (default, *others)}) == 1 + len(others)
    one = dataclasses.replace(WELL, batch=1)
    assert built().settings(one)["splits"] == 16  # parts of 64 keys
    parts = dataclasses.replace(WELL, batch=8, query_len=128, phase="prefill")
    assert built().settings(parts)["splits"] == 1  # 512 programs or more
    grouped = dataclasses.replace(WELL, num_kv_heads=8)
    assert built().settings(grouped)["block"] == 64
    assert built().settings(dataclasses.replace(grouped, head_dim=256))["block"] == 32
    tuning = Tuning(device_kind=WELL.device_kind, settings={WELL.signature: others[0]})
    assert built(tuning=tuning).settings(WELL) == others[0]
    wrong = Tuning(device_kind=WELL.device_kind, settings={WELL.signature: {"block": 48}})
    with pytest.raises(ax.ConfigError, match="tuning: block=48 is not a power of two"):
        built(tuning=wrong).settings(WELL)
    assert built(tuning=tuning, splits=3).settings(WELL) == others[0] | {"splits": 3}


def test_codes_that_triton_addresses_wrongly_raise():
    """Offsets of 2**31 to 2**32 bytes do not fit into the 32 bits that Pallas uses for arrays of this size."""
    kernel = built()
    pool = jax.ShapeDtypeStruct((2**17 + 1, 16, 8, 128), jnp.int8)
    scale = jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32)

    def call(k, v, scale):
        tokens = ax.nn.TokenInfo.of(jnp.zeros((1, 16)))
        view = Paged(
            k, v, jnp.zeros((1, 1), jnp.int32), tokens, jnp.ones(1, jnp.int32), (), (scale, scale), jnp.float32
        )
        query = ax.nn.TokenInfo.of(jnp.zeros((1, 1)))
        q = jnp.zeros((1, 1, 8, 128))
        with ax.module.root(kernel, key=None, training=False):
            return kernel(ax.nn.AttentionInputs(q, view, query, scale=0.1, mask=Causal(), phase="decode"))[0]

    with pytest.raises(ax.ConfigError, match=r"stores 2147500032 numbers of keys of type int8 .* Change num_pages"):
        jax.eval_shape(call, pool, pool, scale)


def test_the_feature_keeps_the_kernels_of_other_calls():
    cfg = ax.pipe(tiny_model(), ax.use("paged-attention"))
    (node,) = (each for _, each in ax.select(cfg, Attention))
    assert node.kernel == ChooseKernel.Config(order=(PagedAttention.Config(), ReferenceKernel.Config()))
    again = ax.pipe(cfg, ax.use("paged-attention", max_queries=4))
    (node,) = (each for _, each in ax.select(again, Attention))
    assert node.kernel.order == (PagedAttention.Config(max_queries=4), ReferenceKernel.Config())
    wrapped = ax.pipe(tiny_model(), ax.use("diff-attention"), ax.use("paged-attention"))
    (node,) = (each for _, each in ax.select(wrapped, Attention))
    assert node.kernel.kernel.order[0] == PagedAttention.Config()


def chosen(cfg, queries: int, cache, target="NVIDIA H200") -> set[str]:
    """The names of the kernels of a step with this many tokens for each row."""
    layout = Mesh().abstract(1, "gpu", target)
    decoder, params, state = Decoder.abstract(cfg, cache=cache, batch_size=2, max_len=160)
    pages = jnp.zeros((2, 40), jnp.int32) if isinstance(cache, PagedCache.Config) else None
    phase = "decode" if queries <= 8 else "prefill"
    step = Step(jnp.zeros((2, queries), jnp.int32), jnp.zeros(2, jnp.int32), pages=pages, phase=phase)
    with layout.active(), recording() as choices:
        jax.eval_shape(decoder.__call__, params, state, step)
    return {type(choice.chosen).__name__ for choice in choices}


@pytest.mark.long
@pytest.mark.parametrize(
    "cache", [PagedCache.Config(page_size=4), ContiguousCache.Config()], ids=lambda each: str(type(each))
)
@pytest.mark.parametrize("target", ["gpu-h100-1", "gpu-h200-1", "gpu-a100-1", "gpu-b200-1"])
def test_mesh_rules_decode_with_the_kernel(cache, target):
    cfg = ax.pipe(ax.recipe("llama-1b"), ax.target(target)).model
    cfg = ax.select(cfg, "decoder").set(num_layers=1)
    assert chosen(cfg, 1, cache) == chosen(cfg, 128, cache) == {"PagedAttention"}
    assert chosen(cfg, 144, cache) == {"ReferenceKernel" if target == "gpu-a100-1" else "CudnnKernel"}


IDS = jax.random.randint(jax.random.key(4), (2, 9), 0, 32)
TABLES = jnp.asarray([[6, 1, 4, 8], [0, 7, 3, 8]])


@pytest.mark.parametrize(
    ("cache", "unstack"),
    [
        pytest.param(PagedCache.Config(page_size=4, num_pages=8), True, marks=pytest.mark.slow),
        pytest.param(PagedCache.Config(page_size=4, num_pages=8), False, marks=pytest.mark.long),
        pytest.param(ContiguousCache.Config(), True, marks=pytest.mark.slow),
        pytest.param(ContiguousCache.Config(), False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_decoding_equals_recomputation(cache, unstack):
    """Prompts, and one and two tokens for each row, in scanned layers as well."""
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=2)
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    expected = np.asarray(jax.jit(lambda ids: fn(params, state, ids)[0][0])(IDS))
    model = ax.pipe(cfg, ax.use("paged-attention", interpret=True)).build(rngs=ax.Rngs(0))
    decoder, params, state = Decoder.of(model, cache=cache, batch_size=2, max_len=12, unstack=unstack)
    pages = TABLES if isinstance(cache, PagedCache.Config) else None
    step, lengths = jax.jit(decoder.__call__, donate_argnums=1), np.asarray([5, 4])
    prompt = Step(IDS[:, :5], jnp.zeros(2, jnp.int32), lengths=jnp.asarray(lengths), pages=pages)
    logits, state = step(params, state, prompt)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], expected[row, :length], rtol=0, atol=2e-5)
    for count in (1, 2, 1):
        tokens = jnp.stack([IDS[row, at : at + count] for row, at in enumerate(lengths)])
        logits, state = step(params, state, Step(tokens, jnp.asarray(lengths), pages=pages))
        right = np.stack([expected[row, at : at + count] for row, at in enumerate(lengths)])
        np.testing.assert_allclose(logits, right, rtol=0, atol=2e-5)
        lengths = lengths + count


@pytest.mark.slow
def test_decoding_on_a_mesh_equals_one_device():
    found = on_devices(eight_devices.main)
    for one, eight in found.values():
        np.testing.assert_allclose(eight, one, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is None, reason="requires the CUDA plugin")
@pytest.mark.parametrize("target", ["gpu-a100-1", "gpu-h100-1", "gpu-b200-1", "gpu-h100-2"])
@pytest.mark.parametrize("codes", [None, "int8"])
def test_a_model_compiles_for_gpus(target, codes):
    """Steps of a decoder with one token and with a part of a prompt for each row, on one device and with heads sharded
    over two. Each layer has two kernels, since the keys are split."""
    cfg = ax.select(tiny_model(), Attention).set(num_heads=8, num_kv_heads=4, head_dim=64)
    cfg = ax.pipe(cfg.set(dtypes=ax.DTypes(compute="bfloat16")), ax.use("paged-attention"))
    cfg = ax.select(cfg, "decoder").set(num_layers=2)
    devices = Target.of(target).devices()
    rules = {"head": "tensor", "kv_head": "tensor"}
    layout = Mesh(shape={"tensor": len(devices)}, rules=rules).make(devices)
    cache = PagedCache.Config(page_size=16, dtype=codes)
    decoder, params, state = Decoder.abstract(cfg, cache=cache, batch_size=4, max_len=256, layout=layout)

    def step(params, state, ids, start, pages):
        return decoder(params, state, Step(ids, start, pages=pages))

    whole = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
    for width in (1, 64):
        shapes = ((4, width), (4,), (4, 16))
        ids, start, pages = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole) for shape in shapes)
        with layout.active():
            text = jax.jit(step).lower(params, state, ids, start, pages).compile().as_text()
        assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 4
