"""`axcore rules RECIPE --target ACCELERATOR`."""

import pytest


def sections(text):
    """The parts of the output, by the first word of each; the changes by their first line."""
    return {
        part.splitlines()[0] if part.startswith("changes") else part.split()[0].rstrip(":"): part
        for part in text.split("\n\n")
    }


def test_the_rule_its_changes_the_mesh_and_the_options_are_shown(axcore):
    out = axcore("rules", "quickstart", "--target", "gpu-h200-4x2", "--set", "input.batch_size=64").out
    found = sections(out)
    assert found["gpu-h200-4x2"].startswith("gpu-h200-4x2: 8 devices on 2 hosts\nrule gpu-h200 of axcore-mesh-rules")
    _, chosen, other = out.split("\n\n")[1].splitlines()
    assert chosen.split()[0] == "gpu-h200" and chosen.endswith("chosen")
    assert other.split()[0] == "gpu"
    assert other.endswith("less specific: gpu-* has fewer literal characters than gpu-h200-*")
    assert (
        "mesh.shape: " in found["changes by the rule:"] and '-> {"data": 2, "fsdp": 4}' in found["changes by the rule:"]
    )
    assert "input.batch_size" not in found["changes by the rule:"]  # it is not set by the rule
    assert (
        "mesh: data=2, fsdp=4\naxes that span hosts: data\nbatch: 64 rows = 8 shards x 1 microbatches x 8 rows" in out
    )
    assert "xla_gpu_enable_triton_gemm" in found["compiler"] and "accepted by the compiler" in found["compiler"]


def test_only_values_that_the_rule_sets_are_changes(axcore):
    out = axcore("rules", "llama2-7b", "--target", "gpu-h200-8").out
    kernel, unroll = (
        out.index("attention.kernel.order.1: axcore_cudnn.kernel.CudnnKernel"),
        out.index("unroll: 1 -> 32"),
    )
    assert kernel < unroll
    assert "~ model.decoder.remat: axcore.parallel.remat.ByTag -> None" in out and "remat.save" not in out
    assert "kernel.chunk" not in out and "order.1.documents" not in out and "kernel.num_heads" not in out
    assert max(map(len, sections(out)["changes by the rule:"].splitlines())) <= 120


def test_edits_after_the_target_are_part_of_the_mesh_and_not_of_the_changes_by_the_rule(axcore):
    out = axcore(
        "rules", "quickstart", "--target", "cpu-8", "--set", "mesh.shape.data=8", "--set", "mesh.shape.fsdp=1"
    ).out
    assert "mesh: data=8, fsdp=1" in out
    assert '-> {"data": 1, "fsdp": 8}' in sections(out)["changes by the rule:"]
    assert '-> {"data": 8, "fsdp": 1}' in sections(out)["changes by the edits after --target:"]
    assert "compiler option" not in out


def test_the_idle_share_of_a_pipeline_is_shown(axcore):
    edits = ("--use", "pipeline:size=2", "--set", "microbatches=8", "--set", "input.batch_size=64")
    out = axcore("rules", "quickstart", "--target", "cpu-8", *edits).out
    assert "batch: 64 rows = 4 shards x 8 microbatches x 2 rows\n" in out
    # Each stage runs 3 tasks for each of 8 microbatches, and waits for one task of the other stage at either end.
    assert f"each of the 2 stages is idle {2 / 26:.1%} of the time" in out


def test_options_for_tpus_are_marked_as_not_checked(axcore):
    out = axcore("rules", "quickstart", "--target", "tpu-v5p-32", "--set", "input.batch_size=24").out
    assert "tpu-v5p-32: 16 devices\n" in out
    assert "xla_tpu_enable_async_collective_fusion " in out and "not checked: no tpu compiler here" in out
    assert "24 rows do not divide into 16 shards x 1 microbatches. Set input.batch_size to a multiple of 16" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quickstart",), "name the accelerator, as in --target gpu-h100-8"),
        (("--target", "cpu-8"), "--target requires a recipe"),
        (("quickstart", "--target", "toaster"), "is not an accelerator; examples: "),
        (("quickstart", "--target", "npu-x1-8"), "no mesh rule matches the target 'npu-x1-8'. Known: cpu-*"),
        (("no-such", "--target", "cpu-8"), "there is no recipe 'no-such'"),
        (
            ("quickstart", "--target", "cpu-8", "--set", "compiler_options.xla_gpu_enable_triton_gem=true"),
            "Did you mean 'xla_gpu_enable_triton_gemm'?",
        ),
        (("quickstart", "--target", "cpu-8", "--set", "mesh.shape.fsdp=3"), "Set sizes whose product is 8"),
    ],
)
def test_invalid_arguments_raise(axcore, arguments, message):
    assert message in axcore("rules", *arguments).message
