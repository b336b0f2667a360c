"""`Gemv`: in interpret mode against float64, and compiled for an H100 without one."""

from __future__ import annotations

import functools
import importlib.util
import re
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
from axcore_gemv.kernel import default_tiling
from axcore_gemv.matmul import Gemv

SMALL = {"columns": 16, "inputs": 16, "loads": 2}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernel on CPUs."""
    monkeypatch.setattr(matmul, "target_device", lambda: ("gpu", "NVIDIA H200"))
    monkeypatch.setattr(matmul, "partial_products", functools.partial(matmul.partial_products, interpret=True))


def operands(rows: int, depth: int, columns: int, dtype: jnp.dtype, weight: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows + depth)
    x, w = rng.normal(size=(rows, depth)), rng.normal(size=(depth, columns))
    if weight == jnp.int8:
        return jnp.asarray(x, dtype), jnp.asarray(rng.integers(-128, 128, w.shape), jnp.int8)
    return jnp.asarray(x, dtype), jnp.asarray(w, weight)


@pytest.mark.long
@pytest.mark.parametrize("weight", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_products_equal_those_of_float64(interpreted: None, rows: int, weight: jnp.dtype) -> None:
    dtype = weight if jnp.dtype(weight).itemsize > 1 else jnp.bfloat16
    for depth, columns, splits in ((96, 48, 3), (100, 40, 2)):
        x, w = operands(rows, depth, columns, dtype, weight)
        found = Gemv(**SMALL, splits=splits)(x, w, jnp.float32)
        assert found.dtype == jnp.float32
        x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
        bound = 1e-6 * (np.abs(x64) @ np.abs(w64)).max()
        np.testing.assert_allclose(np.asarray(found, np.float64), x64 @ w64, rtol=0, atol=bound)
        narrow = Gemv(**SMALL, splits=splits)(x, w)
        assert narrow.dtype == dtype
        np.testing.assert_array_equal(narrow, found.astype(dtype))


def test_tensor_cores_multiply_one_row(interpreted: None) -> None:
    x, w = operands(1, 100, 40, jnp.bfloat16, jnp.int8)
    found = Gemv(**SMALL, splits=2, tensor_cores=True)(x, w, jnp.float32)
    np.testing.assert_allclose(found, Matmul()(x, w, jnp.float32), rtol=1e-5, atol=1e-3)
    with pytest.raises(ax.ConfigError, match="tensor_cores=False computes one row, not 2"):
        Gemv(**SMALL, tensor_cores=False)(jnp.tile(x, (2, 1)), w)


def test_keeps_the_leading_dimensions_and_leaves_many_rows_to_xla(interpreted: None) -> None:
    x, w = operands(4, 64, 32, jnp.bfloat16, jnp.bfloat16)
    shaped = x.reshape(2, 2, 64)
    found = Gemv(**SMALL)(shaped, w, jnp.float32)
    np.testing.assert_allclose(found, Matmul()(shaped, w, jnp.float32), rtol=1e-5, atol=1e-5)
    for max_rows, kernels in ((4, 1), (3, 0)):
        text = str(jax.make_jaxpr(Gemv(**SMALL, max_rows=max_rows))(shaped, w))
        assert text.count("pallas_call") == kernels


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "itemsize"),
    [(1, 4096, 4096, 2), (1, 4096, 12288, 2), (1, 4096, 22016, 1), (4, 11008, 4096, 2), (1, 64, 100, 2)],
)
def test_default_tilings_are_balanced(rows: int, depth: int, columns: int, itemsize: int) -> None:
    made = default_tiling(rows, depth, columns, itemsize, 132)
    assert 1 <= made.splits <= 8
    if depth >= 4096:
        tiles, steps = -(-columns // made.columns), -(-depth // made.chunk)
        longest = -(-tiles * made.splits // 132) * -(-steps // made.splits)
        assert longest <= 1.15 * tiles * steps / 132


@pytest.mark.parametrize(
    ("device", "message"),
    [(("cpu", "cpu"), "got cpu"), (("gpu", "NVIDIA V100"), "V100"), (("tpu", "TPU v5e"), "TPU v5e")],
)
def test_refuses_other_devices(device: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "target_device", lambda: device)
    x, w = operands(1, 16, 16, jnp.bfloat16, jnp.bfloat16)
    with pytest.raises(ax.ConfigError, match=f"requires an A100, H100, H200 or B200 GPU, .*{message}"):
        Gemv()(x, w)


def test_refuses_shards_and_invalid_fields(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operands(1, 16, 16, jnp.bfloat16, jnp.bfloat16)
    with pytest.raises(ax.ConfigError, match="columns=24 must be a power of two"):
        Gemv(columns=24)(x, w)
    with pytest.raises(ax.ConfigError, match="max_rows=17 must be at most 16"):
        Gemv(max_rows=17)(x, w)
    monkeypatch.setattr(matmul, "is_sharded", lambda: True)
    with pytest.raises(ax.ConfigError, match="may be sharded"):
        Gemv()(x, w)


def test_the_feature_selects_linear_maps() -> None:
    cfg = use_gemv(tiny_model(), max_rows=8)
    assert {node.matmul for _, node in ax.select(cfg, Linear)} == {Gemv(max_rows=8)}
    only = use_gemv(tiny_model(), where="**.query")
    assert sum(node.matmul != Matmul() for _, node in ax.select(only, Linear)) == 1


def _kernels(text: str) -> list[str]:
    """The operations of a compiled program that run as kernels: (name, custom call or "")."""
    entry = text[text.index("\nENTRY") :]
    found = re.findall(r"^\s+(?:ROOT )?%[\w.\-]+ = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$", entry, re.MULTILINE)
    skipped = ("parameter", "bitcast", "tuple", "get-tuple-element", "constant")
    return ["gemv" if "xla.gpu.triton" in rest else name for name, rest in found if name not in skipped]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is None, reason="requires the CUDA plugin")
@pytest.mark.parametrize("numerics", [None, "int8"])
def test_a_layer_decodes_with_four_products(numerics: str | None) -> None:
    device = Target.of("gpu-h100-1").devices()[0]
    layout = Mesh(shape={"data": 1}).make([device])
    sharding = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=None, platform="cuda")
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
        counts.append(_kernels(compiled.as_text()))
    assert [each.count("gemv") for each in counts] == [5, 9]  # with the head
    assert len(counts[1]) - len(counts[0]) <= 20
