"""Mesh rules: the fields that they set, and equality of sharded and single-device steps."""

import re

import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.aot import explain
from axcore.aot.lowering import lower
from axcore.aot.targets import Target
from axcore.config import has_field, walk
from axcore.nn import Attention, Blocks, FeedForward, Linear, ReferenceKernel
from axcore.parallel import ByTag, check_options
from axcore.plugin import Accelerator, registry, use_text
from axcore.testing import ParallelismSuite
from axcore_mesh_rules.fit import SCANNED, STATE_COPIES, TAGS, UNROLLED
from axcore_mesh_rules.sizes import Sizes, memory
from axcore_mesh_rules.tpu import ALL_GATHER, ALL_REDUCE, FUSED_ALL_GATHER, SCOPED_VMEM

HALF = ax.DTypes(compute="bfloat16")


@pytest.mark.slow  # tests/parallel runs the suite in the short run
class TestCpu(ParallelismSuite):
    name = "cpu"
    accelerator = "cpu-4x2"


@pytest.mark.slow
class TestGpu(ParallelismSuite):
    name = "gpu-h200"
    accelerator = "gpu-h200-4x2"

    def trainer(self):  # with an input, from which the rule derives remat and microbatches
        data = ax.recipe("quickstart").input.set(batch_size=16, seq_len=16)
        return super().trainer().set(input=data)

    def test_the_rule_sets_remat(self):
        assert self.modify(self.trainer()).model.decoder.remat == ByTag(save=TAGS)


def adapted(recipe, accelerator):
    return ax.pipe(ax.recipe(recipe), ax.target(accelerator))


@pytest.mark.parametrize(
    ("recipe", "accelerator", "shape"),
    [
        ("llama2-7b", "cpu-8", {"data": 1, "fsdp": 8}),
        ("llama2-7b", "gpu-h100-8x4", {"data": 4, "fsdp": 8}),
        ("llama2-7b", "tpu-v5p-512", {"data": 1, "fsdp": 256}),
        ("llama2-7b", "tpu-v5e-256x4", {"data": 4, "fsdp": 256}),
        ("llama2-7b", "trn2-16x4", {"data": 4, "fsdp": -1}),
        ("llama2-7b", "gpu-unknown-8x2", {"data": 2, "fsdp": 8}),
        pytest.param("llama2-70b", "gpu-h100-8x64", {"data": 8, "fsdp": 64}, marks=pytest.mark.long),
        pytest.param("llama2-70b", "gpu-b200-8x4", {"data": 1, "fsdp": 32}, marks=pytest.mark.long),
    ],
)
def test_meshes_shard_over_as_few_hosts_as_the_state_requires(recipe, accelerator, shape):
    assert adapted(recipe, accelerator).mesh.shape == shape


@pytest.mark.parametrize(
    ("accelerator", "remat", "unroll", "tokens"),
    [
        ("gpu-h200-8", None, 32, 16_384),
        ("gpu-h100-8x4", ByTag(save=TAGS), 1, 8192),
        ("tpu-v5p-512", ByTag(save=TAGS), 1, 16_384),
        ("tpu-v5e-256", ByTag(save=("heads", "lse")), 1, 8192),
    ],
)
def test_remat_and_microbatches_depend_on_the_memory(accelerator, remat, unroll, tokens):
    cfg = adapted("llama2-7b", accelerator)
    devices = Accelerator.parse(accelerator).count
    assert (cfg.model.decoder.remat, cfg.model.decoder.unroll) == (remat, unroll)
    assert cfg.input.batch_size * cfg.input.seq_len // devices // cfg.microbatches == tokens


@pytest.mark.long
def test_a_large_model_keeps_fewer_activations():
    cfg = adapted("llama2-70b", "gpu-h100-8x64")
    assert (cfg.model.decoder.remat, cfg.microbatches) == (ByTag(save=("heads", "lse")), 1)
    assert adapted("llama2-70b", "gpu-b200-8").mesh.optimizer_memory == "host"


def test_optimizer_state_is_offloaded_if_it_does_not_fit():
    assert adapted("llama2-7b", "gpu-h200-1").mesh.optimizer_memory == "host"
    assert adapted("llama2-7b", "gpu-h200-8").mesh.optimizer_memory == "device"


def test_the_name_of_a_gpu_may_contain_its_memory():
    small, large = (memory(Accelerator.parse(f"gpu-a100-{kind}8")) for kind in ("40gb-", ""))
    assert (small, large) == (30e9, pytest.approx(64e9, rel=0.01))
    remats = [adapted("llama2-7b", name).model.decoder.remat for name in ("gpu-a100-40gb-8", "gpu-a100-8")]
    assert remats == [ByTag(save=("heads", "lse")), ByTag(save=TAGS)]


def test_a_recipe_without_an_input_gets_only_a_mesh():
    cfg = ax.recipe("llama2-7b").set(input=ax.REQUIRED)
    assert ax.pipe(cfg, ax.target("tpu-v5p-16x2")).mesh.shape == {"data": 2, "fsdp": 8}


def test_a_batch_that_does_not_divide_and_a_model_without_layers_get_only_a_mesh():
    cfg = ax.recipe("quickstart").set(microbatches=2)
    odd = ax.select(cfg, "input").set(batch_size=9)
    assert ax.pipe(odd, ax.target("gpu-h200-8")).microbatches == 2
    assert ax.pipe(cfg.set(model=ax.nn.Linear.Config()), ax.target("tpu-v5e-4")).microbatches == 2


def test_estimated_memory_agrees_with_measured_steps():
    """Llama 1.1B on one H200, 32,768 tokens, unrolled: 45 GB of temporaries without remat, 31.3 GiB with tags. They
    include gradients, which belong to the state in the estimate."""
    sizes = Sizes.of(ax.recipe("llama-1b"))
    rows = 32_768 // sizes.seq_len
    for policy, measured in ((UNROLLED, 45e9), (SCANNED[0], 31.3 * 2**30)):
        estimate = sizes.activations(rows, policy.kept(sizes)) + sizes.parameters
        assert estimate == pytest.approx(measured, rel=0.2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "devices", "rows", "compiled"),
    [
        ("qwen3-30b-a3b", 256, 8, 104.38),
        ("qwen3-30b-a3b", 256, 4, 59.30),
        ("mixtral-8x7b", 256, 2, 69.82),
        ("llama2-7b", 8, 4, 61.61),
    ],
)
def test_estimated_memory_agrees_with_compiled_steps(recipe, devices, rows, compiled):
    """GiB on v5p with rows of 4096 tokens per device, by `axcore aot` with jax 0.11.2 and libtpu 0.0.52."""
    sizes = Sizes.of(ax.recipe(recipe))
    kept = sizes.activations(rows, SCANNED[0].kept(sizes))
    estimate = STATE_COPIES * sizes.parameters / devices + sizes.gathered + kept
    assert estimate / 2**30 == pytest.approx(compiled, rel=0.05)


def test_the_gathered_head_and_the_padding_of_experts_count():
    cfg = ax.recipe("qwen3-30b-a3b")
    sizes = Sizes.of(cfg)
    whole = Sizes.of(cfg.set(objective=cfg.objective.set(chunk=None)))
    assert sizes.head == 151_936 * 2048
    assert sizes.gathered - whole.gathered == 2 * sizes.head  # chunks sum the gradient in float32
    assert sizes.tagged - Sizes.of(ax.use("ragged-dot")(cfg)).tagged == 48 * 2 * 768 * 4  # blocks of 256 rows


@pytest.mark.parametrize(
    ("accelerator", "options"),
    [
        ("gpu-h200-1", {"xla_gpu_enable_triton_gemm": False}),
        (
            "gpu-h100-8",
            {
                "xla_gpu_enable_triton_gemm": False,
                "xla_gpu_enable_latency_hiding_scheduler": True,
                "xla_gpu_all_gather_combine_threshold_bytes": 2**29,  # a layer of 405 MB
                "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**29,
            },
        ),
        (
            "gpu-b200-8",
            {
                "xla_gpu_all_gather_combine_threshold_bytes": 2**29,
                "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**29,
            },
        ),
        ("tpu-v6e-8", {}),
        ("tpu-v5e-16", ALL_GATHER | FUSED_ALL_GATHER),
        ("tpu-v6e-16", ALL_GATHER | SCOPED_VMEM),
        ("tpu-v5p-512x2", ALL_GATHER | ALL_REDUCE),
        ("cpu-8", {}),
    ],
)
def test_compiler_options_are_known_to_the_compiler(accelerator, options):
    cfg = adapted("llama2-7b", accelerator)
    assert cfg.compiler_options == options
    target = Accelerator.parse(accelerator)
    check_options(options, cfg.mesh.abstract(target.count, target.platform))


def test_compiler_options_of_the_user_are_kept():
    cfg = ax.recipe("llama2-7b").set(compiler_options={"xla_gpu_autotune_level": 0})
    assert ax.pipe(cfg, ax.target("gpu-h200-1")).compiler_options["xla_gpu_autotune_level"] == 0


def kernels(cfg):
    return [node.kernel for _, node in ax.select(cfg, Attention)]


KERNELS = [("cudnn", "gpu-h100-8"), ("paged-attention", "gpu-a100-8"), ("splash", "tpu-v5p-8")]


@pytest.fixture(params=KERNELS, ids=lambda param: param[0])
def without_kernel(request, monkeypatch):
    """The name of a kernel whose plugin is disabled, and a target whose rule requires it."""
    pytest.importorskip(f"axcore_{request.param[0].replace('-', '_')}")
    monkeypatch.setenv("AXCORE_DISABLE", request.param[0])
    registry.cache_clear()
    yield request.param
    monkeypatch.undo()
    registry.cache_clear()


def test_h100_attention_uses_only_cudnn():
    """A fallback kernel would be slow without notice."""
    pytest.importorskip("axcore_cudnn")
    pytest.importorskip("axcore_paged_attention")
    recipe = ax.recipe("llama2-7b")
    (kernel,) = kernels(ax.pipe(recipe, ax.target("gpu-h100-8")))
    assert [type(each).__qualname__ for each in kernel.order] == ["PagedAttention.Config", "CudnnKernel.Config"]
    (older,) = kernels(ax.pipe(recipe, ax.target("gpu-a100-8")))
    assert older.order == (kernel.order[0], ReferenceKernel.Config())  # the kernel of the recipe
    own = ax.select(recipe, Attention).set(kernel=kernel.order[0])
    assert kernels(ax.pipe(own, ax.target("gpu-h100-8"))) == [kernel.order[0]]  # an explicit kernel is kept


def test_float32_attention_keeps_the_reference_kernel():
    recipe = ax.recipe("quickstart")
    assert kernels(ax.pipe(recipe, ax.target("gpu-h100-8"))) == kernels(recipe) == [ReferenceKernel.Config()]
    wide = ax.select(ax.recipe("llama2-7b"), Attention).set(dtypes=ax.DTypes(compute=jnp.float32))
    assert kernels(ax.pipe(wide, ax.target("gpu-h100-8"))) == [ReferenceKernel.Config()]
    narrow = ax.select(recipe, Attention).set(dtypes=ax.DTypes(compute=jnp.float16))
    assert kernels(ax.pipe(narrow, ax.target("gpu-h100-8"))) != [ReferenceKernel.Config()]


def test_a_rule_requires_its_kernel_or_an_explicit_reference_kernel(without_kernel):
    (name, target), recipe = without_kernel, ax.recipe("llama2-7b")
    with pytest.raises(ax.ConfigError, match=rf"attention\.kernel: .*Install axcore-{name}, or allow") as refused:
        ax.pipe(recipe, ax.target(target))
    allow = re.search(r"--use (\S+) before --target", str(refused.value))
    (kernel,) = kernels(ax.pipe(recipe, use_text(allow[1]), ax.target(target)))
    assert kernel.order == (ReferenceKernel.Config(),)
    if name != "splash":  # float32 keeps the default kernel
        ax.pipe(ax.recipe("quickstart"), ax.target(target))


def test_tpu_attention_uses_only_splash():
    pytest.importorskip("axcore_splash")
    for name in ("llama2-7b", "quickstart"):  # bfloat16 and float32
        (kernel,) = kernels(ax.pipe(ax.recipe(name), ax.target("tpu-v5p-8")))
        assert [type(each).__qualname__ for each in kernel.order] == ["SplashKernel.Config"]
    recipe = ax.recipe("llama2-7b")
    own = ax.select(recipe, Attention).set(kernel=kernel.order[0].set(fused_backward=True))
    assert kernels(ax.pipe(own, ax.target("tpu-v5p-8"))) == kernels(own)
    narrow = ax.select(recipe, Attention).set(dtypes=ax.DTypes(compute=jnp.float16))
    assert kernels(ax.pipe(narrow, ax.target("tpu-v5p-8"))) == [ReferenceKernel.Config()]


def test_trainium2_attention_uses_only_nki():
    pytest.importorskip("axcore_nki")
    recipe = ax.recipe("llama2-7b")
    cfg = ax.pipe(recipe, ax.target("trn2-16"))
    (kernel,) = kernels(cfg)
    assert [type(each).__qualname__ for each in kernel.order] == ["NkiKernel.Config"]
    assert kernels(ax.pipe(recipe, ax.target("trn1-16"))) == kernels(recipe)
    (found,) = [each for each in explain(cfg, "trn2-16").slots if each.kind == "attention kernel"]
    assert {each.name: each.verdict for each in found.candidates}["nki"] == "chosen"


def test_cudnn_supports_the_packed_rows_of_a_recipe():
    pytest.importorskip("axcore_cudnn")
    cfg = ax.pipe(ax.recipe("llama2-7b"), ax.target("gpu-h100-8"))
    (found,) = [each for each in explain(cfg, "gpu-h100-8").slots if each.kind == "attention kernel"]
    assert "packed rows" in found.request
    verdicts = {each.name: each.verdict for each in found.candidates}
    assert verdicts["cudnn"] == "chosen"
    assert verdicts["paged-attention"] == "no: has no backward pass for training"


def mixture(**options):
    cfg = ax.select(ax.recipe("quickstart"), FeedForward).set(gate=Linear.Config())
    cfg = ax.pipe(cfg, ax.use("moe", num_experts=4, hidden_dim=64, **options))
    cfg = ax.select(cfg, Attention).set(head_dim=64)
    return cfg.set(model=cfg.model.set(dtypes=HALF))


def grouped(cfg, target="gpu-h100-8"):
    """(the grouped product of the mixtures, its slot in `explain`: name -> verdict)."""
    pytest.importorskip("axcore_mosaic_gpu")
    cfg = ax.pipe(cfg, ax.target(target))
    (found,) = {node.dispatch.matmul for _, node in walk(cfg) if has_field(node, "dispatch")}
    (slot,) = [each for each in explain(cfg, target).slots if each.kind == "grouped matmul"]
    return found, {each.name: each.verdict for each in slot.candidates}


@pytest.mark.parametrize("target", ["gpu-h100-8", "gpu-h200-1", "gpu-h200-8x2"])
def test_mixtures_on_hopper_use_the_mosaic_product(target):
    matmul, verdicts = grouped(mixture(), target)
    assert [type(each).__name__ for each in matmul.order] == ["MosaicGrouped", "Blocks"]
    assert verdicts["mosaic-gpu"] == "chosen"
    assert verdicts["blocks"] == "not needed: an earlier grouped product in the order is chosen"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda: mixture(dispatch="dropless"), "runs on the rows of one device, and XLA would gather those of"),
        (lambda: ax.select(mixture(), "**.experts.block").set(hidden_dim=96), "requires multiples of 64 features"),
        (lambda: ax.pipe(mixture(), ax.use("lora", rank=4, where="**.experts.block.up")), "does not multiply by"),
        (lambda: ax.pipe(mixture(), ax.use("int8", where="**.experts.block.up")), "does not multiply by"),
    ],
    ids=["dropless", "features", "adapter", "numerics"],
)
def test_mixtures_that_the_mosaic_product_does_not_support_use_blocks(edit, reason):
    _, verdicts = grouped(edit())
    assert verdicts["blocks"] == "chosen"
    assert verdicts["mosaic-gpu"].startswith(f"no: {reason}")


def test_other_mixtures_keep_their_grouped_product():
    own = ax.pipe(mixture(), ax.use("blocks", size=64))
    assert grouped(own)[0] == Blocks(size=64)
    assert grouped(mixture(), "gpu-a100-8")[0] == Blocks()
    wide = mixture().set(model=mixture().model.set(dtypes=ax.DTypes(compute="float32")))
    assert grouped(wide)[0] == Blocks()


def test_the_rule_requires_the_mosaic_product_or_blocks_of_a_given_size(monkeypatch):
    monkeypatch.setenv("AXCORE_DISABLE", "mosaic-gpu")
    registry.cache_clear()
    try:
        with pytest.raises(ax.ConfigError, match=r"ffn\.dispatch\.matmul: .*Install axcore-mosaic-gpu, or") as refused:
            ax.pipe(mixture(), ax.target("gpu-h100-8"))
        allow = re.search(r"--use (\S+) before --target", str(refused.value))
        ax.pipe(mixture(), use_text(allow[1]), ax.target("gpu-h100-8"))
    finally:
        monkeypatch.undo()
        registry.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"expert": 2, "fsdp": 4}], ids=["fsdp", "expert"])
def test_steps_of_mixtures_on_eight_h100s_have_mosaic_kernels(shape):
    """The kernels run inside the `shard_map` of `Exchange`. Attention is left out, since cuDNN requires its library."""
    pytest.importorskip("axcore_mosaic_gpu")
    pytest.importorskip("jax_plugins.xla_cuda13")
    cfg = ax.select(mixture(), "model.decoder").set(num_layers=2)
    cfg = ax.select(cfg, Attention).set(kernel=ReferenceKernel.Config(chunk=64))
    cfg = ax.pipe(cfg, ax.target("gpu-h100-8")).set(mesh=ax.Mesh(shape=shape))
    lines = lower(cfg, Target.of("gpu-h100-8")).compile().as_text().splitlines()
    kernels = [line for line in lines if 'custom_call_target="mosaic_gpu' in line]
    # In each of 2 layers: 3 products, the input gradients of gate and up together and of down, 3 weight gradients.
    assert len(kernels) == 16
    inside = "ffn/shard_map/"
    assert all(inside in line for line in kernels)
    assert any("all-to-all" in line and inside in line for line in lines) == ("expert" in shape)
