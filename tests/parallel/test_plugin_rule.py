"""A mesh rule of a plugin applies to a run on eight CPU devices."""

import json
import os

import numpy as np
import pytest

import axcore as ax
from axcore.plugin import registry
from axcore.testing import ParallelismSuite
from axcore.train.callbacks.writers import read_jsonl

pytestmark = pytest.mark.long

LAB = """
from axcore.plugin import MeshRule, hookimpl

@hookimpl
def axcore_mesh_rules():
    return [
        MeshRule("lab", "lab_rules:layout_rule", "Data by 2, the rest over features.", "cpu-8"),
        MeshRule("wrong", "lab_rules:wrong", "Everything everywhere, and another objective.", "gpu-wrong-*"),
    ]
"""
RULES = """
def layout_rule(cfg, accelerator):
    rules = {"batch": ("data", "fsdp"), "mlp": "fsdp", "vocab": "fsdp", "head": "fsdp", "kv_head": "fsdp"}
    return cfg.set(mesh=cfg.mesh.set(shape={"data": 2, "fsdp": accelerator.count // 2}, rules=rules))

def wrong(cfg, accelerator):
    mesh = cfg.mesh.set(shape={"data": accelerator.count, "fsdp": 1})
    return cfg.set(mesh=mesh, objective=cfg.objective.set(z_loss=2e-3))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The folder in which the plugin `lab` is installed."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "lab_plugin.py").write_text(LAB)
    (folder / "lab_rules.py").write_text(RULES)
    info = folder / "axcore_lab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: axcore-lab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[axcore.plugins]\nlab = lab_plugin\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        registry.cache_clear()
        yield folder
    registry.cache_clear()


@pytest.mark.usefixtures("lab")
@pytest.mark.slow
class TestLab(ParallelismSuite):
    name = "lab"


class Wrong(ParallelismSuite):
    name = "wrong"
    accelerator = "gpu-wrong-8"
    remat = packed = tied = False


def test_the_more_specific_rule_of_two_plugins_applies(lab):
    mesh = ax.pipe(ax.recipe("quickstart"), ax.target("cpu-8")).mesh
    assert mesh.shape == {"data": 2, "fsdp": 4}  # axcore-mesh-rules has a rule for cpu-*
    assert ax.pipe(ax.recipe("quickstart"), ax.target("cpu-4")).mesh.shape == {"data": 1, "fsdp": 4}


@pytest.mark.slow
def test_the_suite_detects_replicated_parameters_and_a_changed_loss(lab):
    suite = Wrong()
    suite.test_the_batch_is_sharded()
    for check in (
        suite.test_parameters_and_optimizer_state_are_sharded,
        suite.test_loss_and_metrics_equal_one_device,
        suite.test_gradients_equal_one_device,
    ):
        with pytest.raises(AssertionError, match="plain: "):
            check()


@pytest.mark.slow
def test_case_a_run_on_cpu_8_needs_no_setting_and_has_the_losses_of_one_device(lab, processes, corpus, tmp_path):
    def run(name, *flags):
        settings = (f"input.source.folder={corpus}", "input.batch_size=8", "steps=3")
        arguments = [part for each in settings for part in ("--set", each)]
        started = processes.start(
            *("train", "tiny", "--use", "rope", *arguments, *flags, "--out", tmp_path / name),
            prepare=f"import sys; sys.path.insert(0, {str(lab)!r})",
            env={"XLA_FLAGS": "--xla_backend_optimization_level=0"},
        )
        done = started.wait()
        assert done.code == 0, done.err
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        rows = read_jsonl(tmp_path / name / "metrics.jsonl")
        return summary, [row["train/loss"] for row in rows if "train/loss" in row]

    one, expected = run("one")
    eight, found = run("eight", "--target", "cpu-8")
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(eight["validation/bits_per_byte"], one["validation/bits_per_byte"], rtol=1e-5)
    assert len(found) == 3 and eight["devices"].startswith("8 x ") and one["devices"].startswith("1 x ")
    assert 'mesh.shape: {"data": 2, "fsdp": 4}\n' in (tmp_path / "eight" / "config.txt").read_text()
