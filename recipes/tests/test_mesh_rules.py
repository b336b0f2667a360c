"""The mesh rules: what they set, and that a step laid out by them is the step of one device."""

import pytest

import axcore as ax
from axcore.nn import Attention
from axcore.parallel import Remat
from axcore.plugin import registry
from axcore.testing import ParallelismSuite


@pytest.mark.slow  # tests/parallel runs the suite by day
class TestCpu(ParallelismSuite):
    name = "cpu"
    accelerator = "cpu-4x2"


@pytest.mark.parametrize(
    ("accelerator", "shape"),
    [
        ("cpu-8", {"data": 1, "fsdp": 8}),
        ("gpu-h100-8x4", {"data": 4, "fsdp": 8}),
        ("tpu-v5p-512", {"data": 1, "fsdp": 256}),
        ("tpu-v5e-256x4", {"data": 4, "fsdp": 256}),
    ],
)
def test_parameters_are_sharded_within_a_host_or_slice_and_copied_over_them(accelerator, shape):
    assert ax.pipe(ax.recipe("llama2-7b"), ax.target(accelerator)).mesh.shape == shape


def test_small_tpus_recompute_all_and_large_ones_as_the_recipe_says():
    recipe = ax.recipe("llama2-7b")
    assert ax.pipe(recipe, ax.target("tpu-v5e-256")).model.decoder.remat == Remat()
    assert ax.pipe(recipe, ax.target("tpu-v5p-512")).model.decoder.remat == recipe.model.decoder.remat


def kernels(cfg):
    return [node.kernel for _, node in ax.select(cfg, Attention)]


def test_on_an_h100_attention_tries_cudnn_first_where_it_is_installed(monkeypatch):
    pytest.importorskip("axcore_cudnn")
    recipe = ax.recipe("llama2-7b")
    (kernel,) = kernels(ax.pipe(recipe, ax.target("gpu-h100-8")))
    assert [type(each).__qualname__ for each in kernel.order] == ["CudnnKernel.Config", "ReferenceKernel.Config"]
    assert kernels(ax.pipe(recipe, ax.target("gpu-a100-8"))) == kernels(recipe)
    own = ax.select(recipe, Attention).set(kernel=kernel.order[0])
    assert kernels(ax.pipe(own, ax.target("gpu-h100-8"))) == [kernel.order[0]]  # what somebody chose stays
    monkeypatch.setenv("AXCORE_DISABLE", "cudnn")
    registry.cache_clear()
    try:
        assert kernels(ax.pipe(recipe, ax.target("gpu-h100-8"))) == kernels(recipe)
    finally:
        monkeypatch.undo()
        registry.cache_clear()
