"""`Gemv`: in interpret mode against float64, and compiled for an H100 without one."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import axcore as ax
from axcore.aot.targets import Target
from axcore.infer import Decoder, Step
from axcore.nn import (
    Attention,
    CausalLM,
    ContiguousCache,
    FeedForward,
    Linear,
    Matmul,
    Repeat,
    TransformerLayer,
)
from axcore.parallel import Mesh
from axcore.testing import tiny_model
from axcore_gemv import matmul
from axcore_gemv.feature import use_gemv
from axcore_gemv.matmul import Gemv

SMALL = {"warps": 1, "programs": 1}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernel on CPUs."""
    monkeypatch.setattr(matmul, "target_device", lambda: ("gpu", "NVIDIA H200"))
    monkeypatch.setattr(matmul, "product", functools.partial(matmul.product, interpret=True))


def operands(rows: int, depth: int, columns: int, dtype: jnp.dtype, weight: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows + depth)
    x, w = rng.normal(size=(rows, depth)), rng.normal(size=(depth, columns))
    if weight == jnp.int8:
        return jnp.asarray(x, dtype), jnp.asarray(rng.integers(-128, 128, w.shape), jnp.int8)
    return jnp.asarray(x, dtype), jnp.asarray(w, weight)


@pytest.mark.long
@pytest.mark.parametrize("weight", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.float8_e4m3fn])
def test_products_equal_those_of_float64(interpreted: None, weight: jnp.dtype) -> None:
    dtype = weight if jnp.dtype(weight).itemsize > 1 else jnp.bfloat16
    for depth, columns in ((96, 48), (100, 41)):
        x, w = operands(1, depth, columns, dtype, weight)
        found = Gemv(**SMALL)(x, w, jnp.float32)
        assert found.dtype == jnp.float32
        x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
        bound = 1e-6 * (np.abs(x64) @ np.abs(w64)).max()
        np.testing.assert_allclose(np.asarray(found, np.float64), x64 @ w64, rtol=0, atol=bound)
        narrow = Gemv(**SMALL)(x, w)
        assert narrow.dtype == dtype
        np.testing.assert_array_equal(narrow, found.astype(dtype))


@pytest.mark.parametrize("depth", [64, 2048, 4096, 11008])
def test_default_tilings_compute_the_product(interpreted: None, depth: int) -> None:
    for weight in (jnp.float32, jnp.int8):
        x, w = operands(1, depth, 9, jnp.float32, weight)
        np.testing.assert_allclose(Gemv()(x, w), Matmul()(x, w), rtol=1e-4, atol=1e-2)


def test_keeps_the_leading_dimensions_and_leaves_more_rows_to_xla(interpreted: None) -> None:
    x, w = operands(2, 64, 32, jnp.bfloat16, jnp.bfloat16)
    one = x[:1].reshape(1, 1, 64)
    np.testing.assert_allclose(Gemv(**SMALL)(one, w, jnp.float32), Matmul()(one, w, jnp.float32), rtol=1e-5, atol=1e-5)
    for given, kernels in ((one, 1), (x, 0), (x[:0], 0)):
        assert str(jax.make_jaxpr(Gemv(**SMALL))(given, w)).count("pallas_call") == kernels


def test_the_decoder_stores_columns_contiguously(interpreted: None) -> None:
    model = use_gemv(tiny_model()).build(rngs=ax.Rngs(0))
    plain = tiny_model().build(rngs=ax.Rngs(0))
    options: dict[str, Any] = {"cache": ContiguousCache.Config(), "batch_size": 1, "max_len": 8}
    step = Step(jnp.ones((1, 1), jnp.int32), start=jnp.zeros(1, jnp.int32))
    found = []
    for each, order in ((model, (1, 0)), (plain, (0, 1))):
        decoder, params, state = Decoder.of(each, **options)
        weight = params["decoder"]["layers"][0]["ffn"]["gate_up"]["weight"]
        assert weight.format.layout.major_to_minor == order
        found.append(jax.jit(decoder)(params, state, step)[0])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "message"),
    [(("cpu", "cpu"), "got cpu"), (("gpu", "NVIDIA V100"), "V100"), (("tpu", "TPU v5e"), "TPU v5e")],
)
def test_refuses_other_devices(device: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "target_device", lambda: device)
    x, w = operands(1, 16, 16, jnp.bfloat16, jnp.bfloat16)
    with pytest.raises(ax.ConfigError, match=f"requires an A100, H100, H200 or B200 GPU, .*{message}"):
        Gemv()(x, w)


def test_scales_multiply_sums_before_they_are_rounded(interpreted: None) -> None:
    x, w = operands(1, 96, 48, jnp.bfloat16, jnp.int8)
    scales = jnp.linspace(0.01, 0.02, 48)
    for each in (scales, scales[:1]):
        found, right = (f(x, w, None, each) for f in (Gemv(**SMALL), Matmul()))
        assert found.dtype == right.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, right)


def test_leaves_columns_that_are_not_whole_words_to_xla(interpreted: None) -> None:
    for depth, kernels in ((100, 1), (102, 0)):
        x, w = operands(1, depth, 8, jnp.bfloat16, jnp.int8)
        assert str(jax.make_jaxpr(Gemv(**SMALL))(x, w)).count("pallas_call") == kernels


def test_leaves_integers_to_xla(interpreted: None) -> None:
    """Numerics that round activations multiply codes, whose sums float32 does not hold."""
    x, w = jnp.full((1, 4096), 127, jnp.int8).at[0, 0].set(126), jnp.full((4096, 8), 127, jnp.int8)
    np.testing.assert_array_equal(Gemv()(x, w, jnp.int32), Matmul()(x, w, jnp.int32))


def test_refuses_invalid_fields(interpreted: None) -> None:
    x, w = operands(1, 16, 16, jnp.bfloat16, jnp.bfloat16)
    for warps in (24, 64):
        with pytest.raises(ax.ConfigError, match=f"warps={warps} must be a power of two of at most 32"):
            Gemv(warps=warps)(x, w)


def test_the_feature_selects_linear_maps() -> None:
    cfg = use_gemv(tiny_model())
    assert {node.matmul for _, node in ax.select(cfg, Linear)} == {Gemv()}
    only = use_gemv(tiny_model(), where="**.query")
    assert sum(node.matmul != Matmul() for _, node in ax.select(only, Linear)) == 1


def _kernels(text: str) -> list[str]:
    """The operations of a compiled program that run as kernels: the name, or "gemv"."""
    entry = text[text.index("\nENTRY") :]
    found = re.findall(r"^\s+(?:ROOT )?%[\w.\-]+ = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$", entry, re.MULTILINE)
    skipped = ("parameter", "bitcast", "tuple", "get-tuple-element", "constant")
    return ["gemv" if "xla.gpu.triton" in rest else name for name, rest in found if name not in skipped]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is None, reason="requires the CUDA plugin")
@pytest.mark.parametrize(("tensor", "products", "all_reduces"), [(1, 4, 0), (2, 7, 2), (4, 7, 2)])
@pytest.mark.parametrize("numerics", [None, "int8"])
def test_the_kernels_of_a_layer(numerics: str | None, tensor: int, products: int, all_reduces: int) -> None:
    """One device computes products of the same input together. Several add up partial sums after attention and after
    the feed-forward block, and exchange nothing else. No device copies the table of the embedding: XLA for CUDA takes a
    single vector as a slice, and would gather the table for it."""
    layout = Mesh(shape={"tensor": tensor}).make(Target.of(f"gpu-h200-{tensor}").devices())
    sharding = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
    kind = AbstractDevice(device_kind=layout.device_kind, num_cores=None, platform="cuda")
    counts = []
    for layers in (1, 2):
        layer = TransformerLayer.Config(attention=Attention.Config(num_heads=4), ffn=FeedForward.Config(hidden_dim=768))
        cfg: Any = CausalLM.Config(
            vocab_size=1024,
            dim=512,
            dtypes=ax.DTypes(param=jnp.bfloat16, compute=jnp.bfloat16),
            decoder=Repeat.Config(num_layers=layers, layers=layer),
            head=Linear.Config(),
        )
        if numerics is not None:
            cfg = ax.use("int8", activation_scales=None)(cfg)
            cfg = ax.select(cfg, lambda _, node: hasattr(node, "stored")).set(stored=True)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            decoder, params, state = Decoder.abstract(
                use_gemv(cfg), cache=ContiguousCache.Config(), batch_size=1, max_len=128, layout=layout
            )
            one = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=sharding)
            step = Step(jax.ShapeDtypeStruct((1, 1), jnp.int32, sharding=sharding), start=one, phase="decode")
            compiled = jax.jit(decoder.__call__, donate_argnums=1).lower(params, state, step).compile()
        counts.append(Counter(_kernels(compiled.as_text())))
    assert counts[0]["gemv"] == products + 1  # with the head
    exchanges = {name: count for name, count in counts[0].items() if re.match("all-|reduce-scatter|collective-", name)}
    assert exchanges == ({"all-reduce": all_reduces + 1} if tensor > 1 else {})  # with the embedding
    added = counts[1] - counts[0]
    assert added.keys() <= {"gemv", "all-reduce", "fusion"}  # no copies of matrices
    assert (added["gemv"], added["all-reduce"]) == (products, all_reduces)
    assert added["fusion"] <= 16
