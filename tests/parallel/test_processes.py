"""Runs of two and four processes, whose devices share rows or sequences, have the losses of one process."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from axcore.train.callbacks.writers import read_jsonl

from ..conftest import TINY_PLUGIN

STEPS = 4


def losses(corpus, out, shape, *launch):
    """The training losses of `axcore launch ... -- train tiny`, interrupted after half of the steps."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TINY_PLUGIN), *filter(None, sys.path)])}
    train = ["train", "tiny", "--out", str(out), "--set", f"input.source.folder={corpus}"]
    train += ["--set", f"mesh.shape={json.dumps(shape)}"]
    for flags in (["--steps", str(STEPS // 2)], ["--steps", str(STEPS), "--resume"]):
        command = [sys.executable, "-m", "axcore", *launch, *train, *flags]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return [row["train/loss"] for row in read_jsonl(out / "metrics.jsonl") if "train/loss" in row]


@pytest.fixture(scope="module")
def losses_of_one_process(corpus, tmp_path_factory):
    return losses(corpus, tmp_path_factory.mktemp("one_process") / "run", {"data": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "shape"),
    [
        (2, 1, {"data": 2}),
        (2, 1, {"tensor": 2}),
        (2, 2, {"fsdp": 2, "tensor": 2}),
        (2, 2, {"data": 2, "context": 2}),
        (4, 1, {"fsdp": 2, "tensor": 2}),
        (4, 1, {"context": 4}),
    ],
    ids=str,
)
def test_losses_equal_one_process(losses_of_one_process, corpus, tmp_path, processes, devices, shape):
    launch = ["launch", "--processes", str(processes), "--devices-per-process", str(devices), "--timeout", "300", "--"]
    found = losses(corpus, tmp_path / "run", shape, *launch)
    assert len(found) == STEPS
    np.testing.assert_allclose(found, losses_of_one_process, rtol=1e-5)
