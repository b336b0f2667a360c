"""Mesh rules: the fields that they set, and equality of sharded and single-device steps."""

import re

import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.aot import explain
from axcore.nn import Attention, ReferenceKernel
from axcore.parallel import Remat
from axcore.plugin import registry, use_text
from axcore.testing import ParallelismSuite


@pytest.mark.slow  # tests/parallel runs the suite in the short run
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
def test_meshes_shard_within_a_host_and_replicate_over_hosts(accelerator, shape):
    assert ax.pipe(ax.recipe("llama2-7b"), ax.target(accelerator)).mesh.shape == shape


def test_remat_depends_on_the_memory_of_the_tpu():
    recipe = ax.recipe("llama2-7b")
    assert ax.pipe(recipe, ax.target("tpu-v5e-256")).model.decoder.remat == Remat()
    assert ax.pipe(recipe, ax.target("tpu-v5p-512")).model.decoder.remat == recipe.model.decoder.remat


def kernels(cfg):
    return [node.kernel for _, node in ax.select(cfg, Attention)]


@pytest.fixture
def without_cudnn(monkeypatch):
    pytest.importorskip("axcore_cudnn")
    monkeypatch.setenv("AXCORE_DISABLE", "cudnn")
    registry.cache_clear()
    yield
    monkeypatch.undo()
    registry.cache_clear()


def test_h100_attention_uses_only_cudnn():
    """A fallback kernel would be slow without notice."""
    pytest.importorskip("axcore_cudnn")
    recipe = ax.recipe("llama2-7b")
    (kernel,) = kernels(ax.pipe(recipe, ax.target("gpu-h100-8")))
    assert [type(each).__qualname__ for each in kernel.order] == ["CudnnKernel.Config"]
    assert kernels(ax.pipe(recipe, ax.target("gpu-a100-8"))) == kernels(recipe)
    own = ax.select(recipe, Attention).set(kernel=kernel.order[0])
    assert kernels(ax.pipe(own, ax.target("gpu-h100-8"))) == [kernel.order[0]]  # an explicit kernel is kept


def test_float32_attention_keeps_the_reference_kernel():
    recipe = ax.recipe("quickstart")
    assert kernels(ax.pipe(recipe, ax.target("gpu-h100-8"))) == kernels(recipe) == [ReferenceKernel.Config()]
    wide = ax.select(ax.recipe("llama2-7b"), Attention).set(dtypes=ax.DTypes(compute=jnp.float32))
    assert kernels(ax.pipe(wide, ax.target("gpu-h100-8"))) == [ReferenceKernel.Config()]
    narrow = ax.select(recipe, Attention).set(dtypes=ax.DTypes(compute=jnp.float16))
    assert kernels(ax.pipe(narrow, ax.target("gpu-h100-8"))) != [ReferenceKernel.Config()]


def test_h100_requires_cudnn_or_an_explicit_reference_kernel(without_cudnn):
    recipe = ax.recipe("llama2-7b")
    with pytest.raises(ax.ConfigError, match=r"attention\.kernel: .*Install axcore-cudnn, or allow") as refused:
        ax.pipe(recipe, ax.target("gpu-h100-8"))
    allow = re.search(r"--use (\S+) before --target", str(refused.value))
    (kernel,) = kernels(ax.pipe(recipe, use_text(allow[1]), ax.target("gpu-h100-8")))
    assert kernel.order == (ReferenceKernel.Config(),)
    ax.pipe(ax.recipe("quickstart"), ax.target("gpu-h100-8"))


def test_cudnn_supports_the_packed_rows_of_a_recipe():
    pytest.importorskip("axcore_cudnn")
    cfg = ax.pipe(ax.recipe("llama2-7b"), ax.target("gpu-h100-8")).set(microbatches=16)
    (found,) = [each for each in explain(cfg, "gpu-h100-8").slots if each.kind == "attention kernel"]
    assert "packed rows" in found.request
    assert {each.name: each.verdict for each in found.candidates}["cudnn"] == "chosen"
