"""Explanations of configs: suppliers, candidates and verdicts."""

import json
import re

import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.aot import explain
from axcore.module import abstract
from axcore.nn import Attention, Causal, SlidingWindow
from axcore.testing import tiny_model
from axcore.train.data.form import batch_form

ATTENTION = "decoder.layers.attention"


def slot(explanation, kind):
    (found,) = [each for each in explanation.slots if each.kind == kind]
    return found, {candidate.name: candidate.verdict for candidate in found.candidates}


def test_every_node_has_a_supplier_and_an_actor():
    nodes = {node.path: node for node in explain(ax.pipe(tiny_model(), ax.use("rope", theta=5.0))).nodes}
    rotary = nodes[f"{ATTENTION}.position"]
    assert (rotary.kind, rotary.supplier) == ("Rotary", "axcore-rope 0.1.0")
    assert "use:rope" in rotary.by and "theta=5.0" in rotary.by
    assert nodes[ATTENTION].supplier.startswith("axcore 0")
    assert {"", "decoder", "decoder.layers.ffn.gate"} <= nodes.keys()


def test_the_kernel_slot_lists_every_candidate_with_a_verdict():
    found, verdicts = slot(explain(tiny_model()), "attention kernel")
    assert found.paths == (f"{ATTENTION}.kernel",)
    assert (
        "cpu, train, float32, batch=1, query_len=128, key_len=128, num_heads=4, num_kv_heads=2, head_dim=4"
        in found.request
    )
    assert verdicts["reference"] == "chosen"
    assert verdicts["cudnn"] == "no: requires an NVIDIA GPU, got cpu"


def test_the_request_has_the_rows_of_a_microbatch_on_one_device():
    recipe = ax.pipe(ax.recipe("quickstart"), ax.target("cpu-2"))
    (rows,) = {leaf.shape[0] for leaf in batch_form(recipe.input).values()}
    for microbatches in (1, 4):
        found, _ = slot(explain(recipe.set(microbatches=microbatches), "cpu-2"), "attention kernel")
        assert f", batch={rows // 2 // microbatches}, " in found.request


@pytest.mark.parametrize(
    ("target", "kernel", "chosen", "other"),
    [
        ("gpu-h100-8", "cudnn", "cudnn", "not needed"),
        ("tpu-v5p-512", "cudnn", "reference", "no: requires an NVIDIA GPU, got tpu"),
        ("trn2-16", "nki", "nki", "not needed"),
        ("trn1-16", "nki", "reference", "no: requires Trainium2 or later, got trn1"),
    ],
)
def test_a_target_is_explained_without_its_hardware(target, kernel, chosen, other):
    cfg = ax.select(tiny_model(), Attention).set(head_dim=64)
    cfg = ax.pipe(cfg, ax.use("kernels", order=(kernel, "reference"))).set(dtypes=ax.DTypes(compute=jnp.bfloat16))
    _, verdicts = slot(explain(cfg, target), "attention kernel")
    assert verdicts.pop(chosen) == "chosen"
    assert verdicts[{kernel: "reference", "reference": kernel}[chosen]].startswith(other)


def test_a_config_without_a_suitable_kernel_is_explained():
    cfg = ax.pipe(tiny_model(), ax.use("cudnn"))
    cfg = ax.select(cfg, Attention).set(mask=SlidingWindow(size=3), softcap=2.0)
    _, verdicts = slot(explain(cfg, "gpu-h100-8"), "attention kernel")
    assert verdicts["cudnn"] == "no: does not take softcap"
    assert verdicts["reference"].startswith("possible")


def test_case_explain_fails_where_training_does(axcore):
    done = axcore("explain", "quickstart", "--use", "cudnn")
    assert "attention kernel: model.decoder.layers.attention.kernel" in done.out
    cfg = ax.pipe(ax.recipe("quickstart"), ax.use("cudnn"))
    with pytest.raises(ax.ConfigError) as error:
        cfg.build().program().lower_train(batch_form(cfg.input))
    assert done.code == 2 and done.message == f"axcore: {error.value}"
    assert explain(ax.recipe("quickstart")).problems == ()


def test_case_a_kernel_that_is_not_supported_names_the_mesh_rule_that_set_it():
    cfg = ax.recipe("quickstart")
    cfg = ax.pipe(cfg.set(model=cfg.model.set(dtypes=ax.DTypes(compute=jnp.bfloat16))), ax.target("gpu-h100-8"))
    assert explain(cfg, "gpu-h100-8").problems == ()
    (problem,) = explain(cfg).problems
    rule = r"target:gpu-h100-8 of axcore-mesh-rules [^ ]+\(rule='gpu-h100'\)"
    assert re.search(rf"CudnnKernel: requires an NVIDIA GPU, got cpu \(set by {rule}\)\.", problem), problem


def test_the_call_has_its_mask_and_options():
    cfg = ax.select(tiny_model(), Attention).set(mask=SlidingWindow(size=3) & Causal(), softcap=2.0)
    found, _ = slot(explain(cfg), "attention kernel")
    assert found.request.endswith("head_dim=4, mask=SlidingWindow(size=3) & Causal(), softcap")


@pytest.mark.parametrize("target", ["gpu-h200-8", "tpu-v5p-8"])
def test_the_text_is_wrapped_and_the_chosen_kernel_is_first(target):
    shown = str(explain(ax.pipe(ax.recipe("llama2-7b"), ax.target(target)), target))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 120
    start = next(index for index, line in enumerate(lines) if line.startswith("attention kernel:"))
    assert lines[start + 2].strip() == "mask=Causal() & SameSegment(), packed rows"
    assert "  chosen" in lines[start + 3]
    assert "use:rope(theta=10000.0)" in shown and "model.decoder.layers.ffn.gate" in shown.partition("adapter")[2]


def test_slots_with_equal_verdicts_are_grouped():
    found, _ = slot(explain(tiny_model()), "numerics")
    assert len(found.paths) == 9
    assert f"{ATTENTION}.output" in explain(tiny_model()).empty


def test_json_has_the_content_of_the_table(axcore):
    found = json.loads(axcore("explain", "quickstart", "--json").out)
    assert {"platform", "target", "plugins", "nodes", "slots", "empty"} <= found.keys()
    text = axcore("explain", "quickstart").out
    for node in found["nodes"]:
        assert node["supplier"] in text
    assert "chosen" in text


def test_the_command_explains_a_target_and_an_unknown_target_raises(axcore):
    assert "platform: gpu (gpu-h100-8, mesh rule" in axcore("explain", "llama2-7b", "--target", "gpu-h100-8").out
    assert "tpu-v5p-512" in axcore("explain", "llama2-7b", "--target", "toaster").message


def test_case_following_the_advice_of_explain_works():
    """Each `use(...)` that a verdict advises gives a config that can be explained and built, except for input sources,
    which require a path. Ring caches require a sliding window."""
    cfg = ax.pipe(ax.recipe("quickstart"), ax.use("sliding-window", size=8))
    verdicts = {
        each.verdict for found in explain(cfg).slots if found.kind != "input source" for each in found.candidates
    }
    advised = {verdict.partition("; ")[2] for verdict in verdicts if "; use(" in verdict}
    assert 'use("contiguous")' in advised
    for advice in advised:
        followed = ax.pipe(cfg, eval(advice, {"use": ax.use}))
        assert "chosen" in {each.verdict for found in explain(followed).slots for each in found.candidates}
        abstract(followed.model, "model")
