"""The kernels of `MosaicGrouped`: in interpret mode against float64, and compiled for an H100 without one."""

from __future__ import annotations

import functools
import importlib.util
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

import axcore as ax
from axcore.aot.targets import Target
from axcore.testing import GroupedMatmulSuite
from axcore_mosaic_gpu import grouped
from axcore_mosaic_gpu.grouped import MosaicGrouped, Tiles

SIZES = (0, 128, 256, 0)
ROWS, INNER, OUTER = 512, 128, 192  # the last 128 rows belong to no group


def gpu(monkeypatch: pytest.MonkeyPatch, kind: str = "NVIDIA H200") -> None:
    monkeypatch.setattr("axcore.nn.grouped_matmul.target_device", lambda: ("gpu", kind))


def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernels on CPUs, on two simulated multiprocessors."""
    gpu(monkeypatch)
    monkeypatch.setattr(grouped, "_MULTIPROCESSORS", 2)
    for name in ("rows_product", "groups_product"):
        kernel = functools.partial(getattr(grouped, name), interpret=InterpretGPUParams(detect_races=True))
        monkeypatch.setattr(grouped, name, kernel)


def inputs(dtype: jnp.dtype, inner: int = INNER, outer: int = OUTER) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(ROWS, inner)), rng.normal(size=(len(SIZES), inner, outer))
    x[sum(SIZES) :] = 0
    group = jnp.asarray([1, 2, 2, 3], jnp.int32)
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(SIZES, jnp.int32), group


class TestConformance(GroupedMatmulSuite):
    """On other machines than a Hopper GPU, only what the product supports."""

    name = "mosaic-gpu"
    dtypes = ("bfloat16", "float16")
    multiple = 64
    local = True
    platform = "gpu"
    device_kind = "NVIDIA H100 80GB HBM3"
    refused_devices = (("gpu", "NVIDIA A100-SXM4-80GB"), ("gpu", "NVIDIA B200"), ("tpu", "TPU v5p"), ("cpu", "cpu"))


class Interpreted(TestConformance):
    __test__ = False
    options: ClassVar = {
        name: Tiles(columns=128, stages=2) for name in ("forward", "input_gradient", "weight_gradient")
    }

    def runs(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        ("test_products_equal_float64", ("no rows",)),
        ("test_gradients_equal_float64", ("uneven groups",)),
        ("test_gradients_equal_float64", ("empty groups",)),
        ("test_several_stacks_of_matrices_add_up_the_gradients_of_x", ()),
        ("test_features_that_do_not_divide_are_refused_with_their_number", ()),
    ],
)
def test_the_interpreted_kernels_pass_the_suite(
    check: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remat is left out: the interpreter has effects, which `jax.checkpoint` does not support."""
    interpreted(monkeypatch)
    getattr(Interpreted(), check)(*arguments)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("accumulate", "count"), [(None, 2), (jnp.float32, 1)])
def test_products_and_gradients(
    dtype: jnp.dtype, accumulate: jnp.dtype | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted(monkeypatch)
    x, w, sizes, group = inputs(dtype)
    several = tuple(w[:, :, ::sign] for sign in (1, -1)[:count])
    tiles = Tiles(columns=128, stages=2)
    matmul = MosaicGrouped(forward=tiles, input_gradient=tiles, weight_gradient=tiles)
    outs, pull = jax.vjp(lambda x, several: matmul.each(x, several, sizes, group, accumulate), x, several)
    random = np.random.default_rng(1)
    gs = tuple(jnp.asarray(random.normal(size=out.shape), out.dtype) for out in outs)
    dx, dws = pull(gs)
    x64, expected = np.asarray(x, np.float64), np.zeros(x.shape)
    for out, w, g, dw in zip(outs, several, gs, dws, strict=True):
        assert (out.dtype, dx.dtype, dw.dtype) == (accumulate or dtype, dtype, dtype)
        w64, g64 = (np.asarray(value, np.float64) for value in (w, g.astype(dtype)))
        products, sums = np.zeros(out.shape), np.zeros(w.shape)
        for index, (start, size) in enumerate(zip(np.cumsum(SIZES) - SIZES, SIZES, strict=True)):
            rows = slice(start, start + size)
            products[rows], sums[index] = x64[rows] @ w64[index], x64[rows].T @ g64[rows]
            expected[rows] += g64[rows] @ w64[index].T
        close(out, products)
        close(dw, sums)
        assert not np.asarray(dw[0]).any() and not np.asarray(dw[3]).any()
    close(dx, expected)


def close(value: jax.Array, expected: np.ndarray) -> None:
    """Float32 sums, rounded once."""
    eps = float(jnp.finfo(value.dtype).eps)
    np.testing.assert_allclose(np.asarray(value, np.float64), expected, rtol=eps, atol=2e-5)


@pytest.mark.parametrize(
    ("platform", "kind", "works"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", True),
        ("gpu", "NVIDIA H200", True),
        ("gpu", "NVIDIA GH200 480GB", True),
        ("gpu", "NVIDIA A100-SXM4-80GB", False),
        ("gpu", "NVIDIA B200", False),
        ("cpu", "cpu", False),
    ],
)
def test_refuses_other_devices(platform: str, kind: str, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axcore.nn.grouped_matmul.target_device", lambda: (platform, kind))
    if works:
        jax.eval_shape(lambda *args: MosaicGrouped()(*args), *inputs(jnp.bfloat16))
        return
    with pytest.raises(ax.ConfigError, match=f"requires a Hopper GPU.*{kind}"):
        jax.eval_shape(lambda *args: MosaicGrouped()(*args), *inputs(jnp.bfloat16))


def test_refuses_dtypes_and_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    with pytest.raises(ax.ConfigError, match="float32"):
        MosaicGrouped()(*inputs(jnp.float32))
    for sizes in ((120, 128), (128, 120)):
        with pytest.raises(ax.ConfigError, match="multiples of 64 features, got"):
            MosaicGrouped()(*inputs(jnp.bfloat16, *sizes))
    with pytest.raises(ax.ConfigError, match="columns=64"):
        MosaicGrouped(forward=Tiles(columns=64))(*inputs(jnp.bfloat16))
    with pytest.raises(ax.ConfigError, match="stages=9"):
        MosaicGrouped(forward=Tiles(stages=9))(*inputs(jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is None, reason="requires the CUDA plugin")
@pytest.mark.parametrize("accumulate", [None, jnp.float32])
def test_compiles_for_an_h100(accumulate: jnp.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    where = jax.sharding.SingleDeviceSharding(Target.of("gpu-h100-1").devices()[0])
    arguments = [
        jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where) for value in inputs(jnp.bfloat16, 320, 448)
    ]

    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array, group: jax.Array) -> jax.Array:
        return MosaicGrouped()(x, w, sizes, group, accumulate).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 2  # the result is unused
    text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3
