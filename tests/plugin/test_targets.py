"""`target`: how accelerator names are parsed, and which mesh rule applies."""

import os
import subprocess
import sys

import pytest

import axcore as ax
from axcore.config import ConfigError
from axcore.plugin import Accelerator, MeshRule, PluginError, mesh_rule, mesh_rules, recipe_of, registry, target

CODE = """
import axcore as ax

class Node(ax.Config):
    size: int = 1
    name: str = "none"

def plain(cfg):
    return cfg.set(size=7)

def told(cfg, accelerator):
    return cfg.set(size=accelerator.count, name=accelerator.kind)

def keyword(cfg, *, accelerator=None):
    return cfg.set(size=accelerator.per_host)

def fails(cfg):
    raise ax.ConfigError("mesh.shape is wrong")

def needs_more(cfg, width):
    return cfg

def nothing(cfg):
    pass

def needs_a_kernel(cfg):
    return ax.pipe(cfg, ax.use("no-such-kernel"))

def needs_an_order(cfg):
    return ax.pipe(cfg, ax.use("kernels", order=("no-such-kernel", "reference")))
"""


@pytest.fixture
def rules(site, monkeypatch):
    """`rules(id, pattern=function, ...)` installs a plugin with these mesh rules; no other plugin is enabled."""
    (site.folder / "thrown_code.py").write_text(CODE)
    ids = []

    def install(id, **functions):
        offers = ", ".join(
            f"MeshRule({f'{id}-{number}'!r}, 'thrown_code:{name}', '', {pattern!r})"
            for number, (pattern, name) in enumerate(functions.items())
        )
        site.install(id, f"@hookimpl\ndef axcore_mesh_rules():\n    return [{offers}]\n")
        ids.append(id)
        monkeypatch.setenv("AXCORE_PLUGINS", ",".join(ids))
        registry.cache_clear()

    return install


def node():
    from thrown_code import Node

    return Node()


@pytest.mark.parametrize(
    ("text", "platform", "kind", "count", "hosts"),
    [
        ("cpu-8", "cpu", "", 8, 1),
        ("cpu-4x2", "cpu", "", 8, 2),
        ("gpu-h100-8", "gpu", "h100", 8, 1),
        ("gpu-h100-8x4", "gpu", "h100", 32, 4),
        ("gpu-a100-40gb-8x2", "gpu", "a100-40gb", 16, 2),
        ("tpu-v5p-512", "tpu", "v5p", 256, 1),  # 512 cores are 256 chips
        ("tpu-v4-8", "tpu", "v4", 4, 1),
        ("tpu-v5e-256x4", "tpu", "v5e", 1024, 4),
        ("trn2-16x64", "trn", "trn2", 1024, 64),
        ("trn-16", "trn", "", 16, 1),
        ("rocm-mi300-8", "rocm", "mi300", 8, 1),
    ],
)
def test_parse_reads_platform_kind_devices_and_hosts(text, platform, kind, count, hosts):
    assert Accelerator.parse(text) == Accelerator(text, platform, kind, count, hosts)
    assert Accelerator.parse(text).per_host * hosts == count


def test_the_backend_is_the_name_of_the_platform_in_jax():
    assert [Accelerator.parse(text).backend for text in ("trn2-16", "gpu-h100-8", "cpu-8")] == ["neuron", "gpu", "cpu"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "h100", "cpu", "cpu-", "cpu-eight", "cpu-٨", " cpu-8", "cpu-8\n", "npu x1-8", "8-8"),
        *("gpu", "gpu-8", "gpu-h100", "gpu-h100-8x", "gpu-h100-x4", "gpu-h100-8x4x2", "GPU-H100-8", "tpu-8"),
    ],
)
def test_invalid_accelerator_text_raises_with_examples(text):
    with pytest.raises(ConfigError) as error:
        target(text)
    assert repr(text) in str(error.value) and "gpu-h100-8x4 (4 hosts of 8)" in str(error.value)


def test_case_npu_x1_16_may_have_rules(rules):
    assert Accelerator.parse("npu-x1-16") == Accelerator("npu-x1-16", "npu", "x1", 16, 1)
    assert Accelerator.parse("npu-x1-pod-16x4") == Accelerator("npu-x1-pod-16x4", "npu", "x1-pod", 64, 4)
    rules("bench", **{"npu-x1-*": "told"})
    assert ax.pipe(node(), target("npu-x1-16x2")) == node().set(size=32, name="x1")
    with pytest.raises(PluginError, match=r"no mesh rule matches the target 'npu-x2-16'. Known: npu-x1-\* \(bench\)"):
        target("npu-x2-16")


@pytest.mark.parametrize(
    "pattern",
    [
        *("*", "npu-x1-*", "gpu-*", "gpu-h100-8x?", "gpu-[bc]*-8x4", "*-h100-8x4", "tpu-v5p-*", "cpu-[0-9]", "*8x*4"),
        *("*-*-*-*-*", "trn2-*", "gpu-[!h]100-*", "*x*x*x*"),
    ],
)
def test_patterns_that_some_accelerator_matches_are_accepted(rules, pattern):
    rules("bench", **{pattern: "plain"})
    assert [rule.pattern for _, rule in registry().offers(MeshRule)] == [pattern]


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "h100",
        "gpu-h100",
        "GPU-*",
        "gpu_h100-*",
        "npu x1-*",
        "tpu-v5p-7",
        "cpu-[A-Z]",
        "*-8x",
        "gpu-h100-0",
    ],
)
def test_case_patterns_that_nothing_can_match_fail_and_are_named(rules, pattern):
    rules("bench", **{pattern: "plain"})
    plugin = registry().plugins["bench"]
    assert plugin.state == "failed"
    assert f"axcore_mesh_rules: no accelerator matches the pattern {pattern!r} of 'bench-0'." in plugin.reason


@pytest.mark.parametrize("text", ["cpu-0", "gpu-h100-8x0", "tpu-v5p-7", "tpu-v5p-0"])
def test_zero_or_half_a_device_raises(text):
    with pytest.raises(ConfigError, match=f"'{text}' must name"):
        target(text)


def test_a_rule_may_take_the_accelerator(rules):
    rules("bench", **{"gpu-h100-*": "plain", "tpu-v5p-*": "told", "tpu-v5e-*": "keyword"})
    assert ax.pipe(node(), target("gpu-h100-8")).size == 7
    assert ax.pipe(node(), target("tpu-v5p-512")) == node().set(size=256, name="v5p")
    assert ax.pipe(node(), ax.target("tpu-v5e-16x4")).size == 16


def test_the_most_specific_pattern_wins_across_plugins(rules):
    rules("aaa", **{"gpu-*": "told", "gpu-h100-8x?": "plain"})
    rules("zzz", **{"*": "fails", "gpu-h100-*": "fails", "gpu-[bc]*-8x4": "fails"})
    found = mesh_rules(Accelerator.parse("gpu-h100-8x4"), "")
    assert [rule.pattern for _, rule in found] == [
        "gpu-h100-8x?",
        "gpu-h100-*",
        "gpu-*",
        "*",
    ]
    assert ax.pipe(node(), target("gpu-h100-8x4")).size == 7
    assert ax.pipe(node(), target("gpu-a100-8")).size == 8


def test_two_equally_specific_rules_raise_and_are_named(rules):
    rules("one", **{"gpu-h100-*": "plain"})
    rules("two", **{"*-h100-8x4": "plain", "gpu-*": "plain"})
    with pytest.raises(PluginError) as error:
        ax.pipe(node(), target("gpu-h100-8x4"))
    for part in ("(gpu-h100-*) of one (ax-one 0.1)", "(*-h100-8x4) of two (ax-two 0.1)", "AXCORE_DISABLE=two"):
        assert part in str(error.value)
    assert "(gpu-*)" not in str(error.value)  # less specific
    assert ax.pipe(node(), target("gpu-a100-8x4")).size == 7  # the only rule for this accelerator


def test_a_target_without_a_rule_raises_and_lists_the_patterns(rules):
    rules("one", **{"gpu-h100-*": "plain", "tpu-*": "plain"})
    with pytest.raises(PluginError, match="no mesh rule matches the target 'trn2-16'") as error:
        target("trn2-16")
    assert "gpu-h100-* (one), tpu-* (one)" in str(error.value)


def test_without_rules_the_error_names_the_disabled_plugin(rules):
    rules("empty")
    with pytest.raises(PluginError, match=r"plugin 'mesh-rules' .* is installed but disabled: by AXCORE_PLUGINS"):
        target("cpu-8")


def test_without_rules_the_error_says_what_to_install(alone):
    with pytest.raises(PluginError, match="pip install axcore-mesh-rules"):
        target("cpu-8")


RECIPES = """
from axcore.plugin import MeshRule, Recipe, hookimpl

@hookimpl
def axcore_recipes():
    return [Recipe(name, "thrown_code:Node", "") for name in ("small", "small-2", "large")]

@hookimpl
def axcore_mesh_rules():
    return [
        MeshRule("every", "thrown_code:told", "", "npu-x1-*"),
        MeshRule("small", "thrown_code:plain", "", "npu-*", recipe="small*"),
        MeshRule("few", "thrown_code:keyword", "", "npu-x1-*", devices=(1, 8)),
        MeshRule("many", "thrown_code:plain", "", "lab-x2-*", devices=(16, None)),
    ]
"""


@pytest.fixture
def bench(rules, site, monkeypatch):
    """A plugin with recipes and with mesh rules for some of them and for some numbers of devices."""
    rules("unused")
    site.install("bench", RECIPES)
    monkeypatch.setenv("AXCORE_PLUGINS", "bench")
    registry.cache_clear()


def test_a_rule_for_a_recipe_or_for_fewer_devices_is_more_specific(bench):
    def chosen(accelerator, recipe):
        return mesh_rule(Accelerator.parse(accelerator), recipe)[1].name

    assert chosen("npu-x1-16", "large") == chosen("npu-x1-9", "") == "every"
    assert chosen("npu-x1-8", "large") == "few"
    assert chosen("npu-x1-8", "small") == chosen("npu-x1-16", "small-2") == "small"
    assert ax.pipe(ax.recipe("small"), target("npu-x1-16")).size == 7
    assert ax.pipe(ax.recipe("large"), target("npu-x1-16")).size == 16


def test_the_recipe_of_a_config_is_the_one_that_made_it(bench):
    assert recipe_of(ax.recipe("small").set(size=3)) == "small"
    assert recipe_of(node()) == ""


def test_a_target_outside_the_range_or_the_recipes_of_every_rule_says_so(bench):
    with pytest.raises(PluginError, match=r"'lab-x2-8'\. The rule 'many' of bench: .* at least 16 devices, not to 8"):
        target("lab-x2-8")
    edit = target("npu-x3-8")
    with pytest.raises(PluginError, match=r"recipe 'large' .*'small' of bench: it applies to the recipes small\*"):
        edit(ax.recipe("large"))
    with pytest.raises(PluginError, match="the config, which no recipe made, on the target 'npu-x3-8'"):
        edit(node())


@pytest.mark.parametrize("devices", [(0, 8), (8, 4), (1,), (1, 2, 3), ("1", None), 8, None], ids=repr)
def test_an_invalid_range_of_devices_fails_and_is_named(site, monkeypatch, devices):
    offer = f"MeshRule('r', 'math:sqrt', '', 'npu-*', devices={devices!r})"
    site.install("bench", f"@hookimpl\ndef axcore_mesh_rules():\n    return [{offer}]\n")
    monkeypatch.setenv("AXCORE_PLUGINS", "bench")
    registry.cache_clear()
    plugin = registry().plugins["bench"]
    assert plugin.state == "failed" and "must be the least and the largest number of devices" in plugin.reason


def test_a_rule_that_cannot_be_loaded_or_called_names_its_plugin(rules):
    rules("bench", **{"cpu-*": "absent", "gpu-*": "needs_more"})
    with pytest.raises(PluginError, match=r"the mesh rule 'bench-0' of ax-bench 0\.1 could not be loaded"):
        ax.pipe(node(), target("cpu-8"))
    with pytest.raises(PluginError, match=r"rule 'gpu-\*' \(ax-bench 0\.1\) failed: TypeError: .* missing .* 'width'"):
        ax.pipe(node(), target("gpu-h100-8"))


def test_an_error_of_a_rule_names_target_pattern_and_plugin(rules):
    rules("bench", **{"cpu-*": "fails"})
    with pytest.raises(ConfigError, match=r"target 'cpu-8', rule 'cpu-\*' \(ax-bench 0\.1\): mesh\.shape is wrong"):
        ax.pipe(node(), target("cpu-8"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("needs_a_kernel", "no installed plugin offers the feature 'no-such-kernel'"),
        ("needs_an_order", "feature 'kernels' .*: no installed plugin offers the attention kernel 'no-such-kernel'"),
    ],
)
def test_case_a_kernel_that_a_rule_needs_and_that_is_missing_is_reported_with_the_rule(rules, name, told):
    rules("bench", **{"cpu-*": name})
    with pytest.raises(PluginError, match=rf"^target 'cpu-8', rule 'cpu-\*' \(ax-bench 0\.1\): {told}"):
        ax.pipe(node(), target("cpu-8"))


def test_a_rule_that_returns_none_raises(rules):
    rules("bench", **{"cpu-*": "nothing"})
    with pytest.raises(ConfigError, match=r"target:cpu-8 of ax-bench 0\.1 returned NoneType"):
        ax.pipe(node(), target("cpu-8"))


def test_the_history_names_the_target_that_set_a_value(rules):
    rules("bench", **{"cpu-*": "plain"})
    history = str(ax.pipe(node(), target("cpu-8")).history("size"))
    assert "target:cpu-8 of ax-bench 0.1(rule='bench-0'): set size" in history


def test_command_line_edits_and_targets_apply_in_order(axcore):
    def mesh(*flags):
        out = axcore("show", "quickstart", *flags).out
        return next(line for line in out.splitlines() if line.startswith("mesh.shape"))

    assert mesh("--target", "cpu-8") == 'mesh.shape: {"data": 1, "fsdp": 8}'
    assert mesh("--target", "gpu-h100-8x4", "--set", "mesh.shape.fsdp=16") == 'mesh.shape: {"data": 4, "fsdp": 16}'
    assert mesh("--set", "mesh.shape.fsdp=16", "--target", "gpu-h100-8x4") == 'mesh.shape: {"data": 4, "fsdp": 8}'
    assert "mesh.shape" in axcore("diff", "quickstart", "quickstart", "--target", "cpu-8").out
    assert "Known: " in axcore("show", "quickstart", "--target", "npu-x1-16").message
    assert "is not an accelerator" in axcore("aot", "quickstart", "--target", "h100").message
    assert "is not an accelerator" in axcore("train", "quickstart", "--target", "h100").message


@pytest.mark.parametrize("argv", [("tree", "quickstart"), ("generate", "quickstart", "--prompt", "a")])
def test_case_commands_without_a_mesh_take_no_target(axcore, argv):
    assert "unrecognized arguments: --target cpu-8" in axcore(*argv, "--target", "cpu-8").err


@pytest.mark.long
def test_case_train_gives_jax_the_devices_of_cpu_8():
    """The last --target counts, and the devices are those of one host."""
    code = "from axcore.cli.compose import split_cpu; split_cpu({edits}); import jax; print(len(jax.devices()))"
    edits = [("target", "cpu-2"), ("set", "steps=3"), ("target", "cpu-8x2")]
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    command = [sys.executable, "-c", code.format(edits=edits)]
    assert int(subprocess.run(command, capture_output=True, env=env, check=True).stdout) == 8
