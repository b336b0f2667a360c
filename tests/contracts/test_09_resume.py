"""Contract 9: on resume, changes to the mathematics of a run raise; changes to its layout do not."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import axcore as ax
from axcore.config import parse_text
from axcore.nn import Attention, AttentionKernel, ReferenceKernel, Repeat
from axcore.parallel import ByTag
from axcore.train.callbacks.writers import read_jsonl
from axcore.train.data.form import batch_form
from axcore.train.run import identity

from ..conftest import TINY_PLUGIN

ROOT = pathlib.Path(__file__).parents[2]
DEVICES = {1: ["data=1", "fsdp=1"], 8: ["data=1", "fsdp=8"], (2, 4): ["data=2", "fsdp=4"]}


def train(corpus, folder, steps, devices, *flags):
    """Runs one attempt in a separate process. Returns its stderr."""
    count = devices if isinstance(devices, int) else 8
    given = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    env = os.environ | {
        "XLA_FLAGS": " ".join([*given, f"--xla_force_host_platform_device_count={count}"]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TINY_PLUGIN), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-m", "tests.contracts.resume_on_mesh", str(corpus), str(folder), str(steps)]
    done = subprocess.run([*command, *DEVICES[devices], *flags], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def losses(folder):
    return [line["train/loss"] for line in read_jsonl(folder / "metrics.jsonl")]


@pytest.mark.long
def test_case_a_run_resumes_on_1_then_8_then_2x4_devices(corpus, tmp_path):
    train(corpus, tmp_path / "whole", 9, 1)
    folder = tmp_path / "moved"
    train(corpus, folder, 3, 1)
    told = train(corpus, folder, 6, 8, "--resume")
    assert "resuming after step 3" in told and "~ steps: 3 -> 6" in told and "mesh.shape" in told
    train(corpus, folder, 9, (2, 4), "--resume")
    whole, moved = losses(tmp_path / "whole"), losses(folder)
    assert len(moved) == len(whole) == 9 and whole[-1] < whole[0]
    np.testing.assert_allclose(moved, whole, rtol=2e-5)
    assert moved[:3] == whole[:3]


FREE = [
    'mesh.shape={"data": 8}',
    "microbatches=2",
    "steps=99",
    "callbacks.saving.every_minutes=3.0",
    "checkpointer.keep=7",
    "objective.chunk=4",
    "model.decoder.unroll=2",
    "model.decoder.layers.attention.kernel.chunk=8",
]
FIXED = [
    "learner.schedule.peak=0.5",
    "learner.clip_norm=2.0",
    "seed=3",
    "model.decoder.layers.ffn.hidden_dim=48",
    "model.decoder.layers.attention.softcap=5.0",
    "objective.z_loss=0.5",
    "input.seq_len=8",
    "input.shuffle=False",
]


@pytest.mark.parametrize("assignment", FREE, ids=lambda each: each.partition("=")[0])
def test_case_layout_length_and_callbacks_may_change(tiny, assignment):
    allowed = identity.check(parse_text(tiny.text()), ax.override(tiny, [assignment]), "runs/a")
    assert [change.path for change in allowed] == [assignment.partition("=")[0]]


@pytest.mark.parametrize("assignment", FIXED, ids=lambda each: each.partition("=")[0])
def test_changes_of_the_mathematics_are_rejected_and_shown(tiny, assignment):
    path, _, value = assignment.partition("=")
    with pytest.raises(ax.ConfigError, match="cannot be resumed with this config") as error:
        identity.check(parse_text(tiny.text()), ax.override(tiny, [assignment, "steps=99"]), "runs/a")
    message = str(error.value)
    assert f"~ {path}: " in message and f"-> {value}" in message
    assert "steps" not in message and "--use run-weights:folder=runs/a" in message


class Sharpened(AttentionKernel):
    """A kernel that wraps another and affects the result."""

    class Config(AttentionKernel.Config):
        layout_fields = ("kernel",)
        kernel: AttentionKernel.Config = ReferenceKernel.Config()
        factor: float = 2.0


def test_only_the_inner_kernel_of_a_result_changing_kernel_may_change(tiny):
    def sharpened(**fields):
        return ax.select(tiny, Attention).set(kernel=Sharpened.Config(**fields))

    old = parse_text(sharpened().text())
    (change,) = identity.check(old, sharpened(kernel=ReferenceKernel.Config(chunk=8)), "runs/a")
    assert change.path == "model.decoder.layers.attention.kernel.kernel.chunk"
    for before, after in ((old, sharpened(factor=3.0)), (parse_text(tiny.text()), sharpened())):
        with pytest.raises(ax.ConfigError, match=r"which changes what it computes(.|\n)*kernel\.factor"):
            identity.check(before, after, "runs/a")


def test_a_kernel_and_a_remat_policy_may_change(tiny):
    other = ax.select(tiny, Attention).set(kernel=ReferenceKernel.Config(chunk=2))
    other = ax.select(other, Repeat).set(remat=ByTag(save=("query",)))
    assert len(identity.check(parse_text(tiny.text()), other, "runs/a")) >= 2


@pytest.mark.parametrize(
    ("where", "layer"),
    [
        ("decoder.layers", r"decoder\.layers\.\* \(TransformerLayer\)"),
        ("decoder.layers.attention", r"decoder\.layers\.\*\.attention \(Attention\)"),
    ],
)
def test_microbatches_may_change_only_if_no_layer_draws_random_numbers(tiny, tmp_path, where, layer):
    assert tiny.build().program().random_layer(batch_form(tiny.input)) is None
    cfg = ax.override(tiny, [f"model.{where}.dropout=0.1"])
    (tmp_path / "config.txt").write_text(cfg.text())
    with pytest.raises(ax.ConfigError, match=rf"microbatches=2: {layer} draws random .* Set microbatches=1, or"):
        ax.fit(cfg.set(microbatches=2), tmp_path, resume=True)


@pytest.mark.long
def test_case_resume_rejects_changed_data(tiny, tmp_path, corpus):
    """The corpus changes between two attempts; the config does not."""
    copied = tmp_path / "corpus"
    copied.mkdir()
    for path in corpus.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    cfg = ax.override(tiny, [f"input.source.folder={copied}", "steps=1"]).set(callbacks={})
    ax.fit(cfg, out=tmp_path / "run")
    source = cfg.input.source.build()
    validation = next(path for path in sorted(copied.iterdir()) if source.is_validation(path.name))
    text = validation.read_text()
    validation.write_text(text[::-1])
    with pytest.raises(ax.AxcoreError, match="the data differs from that of the checkpoint"):
        ax.fit(cfg.set(steps=2), out=tmp_path / "run", resume=True)
    validation.write_text(text)
    assert ax.fit(cfg.set(steps=2), out=tmp_path / "run", resume=True)["steps"] == 2
