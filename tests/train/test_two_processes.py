"""Two processes train like one, and do not start with different configs or packages."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

import axcore as ax
from axcore.train import FromRun
from axcore.train.run import agreement

from ..conftest import TINY_PLUGIN
from .two_processes import STEPS, config, losses

pytestmark = pytest.mark.long

CONFIG_LINES = [
    "  learner.clip_norm: 1.0 on process 0; 2.0 on process 1",
    "  seed: 0 on process 0; 1 on process 1",
]
ROOT = pathlib.Path(__file__).parents[2]


def run_two(corpus, folder, plugins):
    """What each of two processes prints, each with its own folder of plugins."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for process, plugin in enumerate(plugins):
        search = os.pathsep.join([str(ROOT), str(plugin), *filter(None, sys.path)])
        arguments = [str(process), str(port), str(corpus), str(folder)]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.train.two_processes", *arguments],
                env=os.environ | {"PYTHONPATH": search},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        done = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(err for _, err in done)
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def agreeing(corpus, folder):
    return run_two(corpus, folder, [TINY_PLUGIN, TINY_PLUGIN])


@pytest.mark.slow
def test_two_processes_train_to_the_losses_of_one(agreeing, corpus, tiny_on_path, folder, tmp_path):
    ax.fit(config(corpus), tmp_path / "one")
    expected = losses(tmp_path / "one")
    assert len(expected) == STEPS and expected[-1] < expected[0]
    for each in agreeing:
        assert each["devices"] == 2
        np.testing.assert_allclose(each["straight"], expected, rtol=1e-5)
    alone = json.loads((tmp_path / "one/summary.json").read_text())
    shared = json.loads((folder / "run/summary.json").read_text())
    np.testing.assert_allclose(shared["validation/bits_per_byte"], alone["validation/bits_per_byte"], rtol=1e-5)
    assert shared["tokens"] == alone["tokens"]


@pytest.mark.slow
def test_two_processes_resume_to_the_same_losses(agreeing, folder):
    assert [each["steps"] for each in agreeing] == [[3], [3]]
    for each in agreeing:
        assert each["resumed"] == each["straight"]
    assert agreeing[0]["summary"]["validation/bits_per_byte"] == agreeing[1]["summary"]["validation/bits_per_byte"]
    assert sorted(path.name for path in (folder / "run/checkpoints").iterdir()) == ["3", "6"]


@pytest.mark.slow
def test_case_two_processes_start_from_weights_like_one(agreeing, corpus, tiny_on_path, folder, tmp_path):
    begun = config(corpus).set(initial=FromRun.Config(folder=str(folder / "run"), step=3), steps=2)
    ax.fit(begun, tmp_path / "one")
    expected = losses(tmp_path / "one")
    assert expected[0] < agreeing[0]["straight"][0]
    for each in agreeing:
        np.testing.assert_allclose(each["begun"], expected, rtol=1e-5)


@pytest.mark.slow
def test_different_configs_stop_both_processes_and_are_shown(agreeing, folder):
    first, second = (each["other config"] for each in agreeing)
    assert first == second
    assert "the 2 processes of this run have different configs or packages; nothing was trained" in first
    assert first.splitlines()[1:] == CONFIG_LINES
    assert not (folder / "other").exists()


@pytest.mark.slow
def test_an_error_before_training_stops_both(agreeing):
    first, second = (each["folder"] for each in agreeing)
    assert "is a file" in first and second == f"process 0 of 2 failed: {first}"
    for each in agreeing:
        assert "minutes=1.0 requires a run of one process" in each["minutes"]


def test_different_plugin_versions_stop_both_processes(corpus, tmp_path):
    newer = tmp_path / "newer"
    shutil.copytree(TINY_PLUGIN, newer)
    metadata = newer / "axcore_tiny-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    found = run_two(corpus, tmp_path, [TINY_PLUGIN, newer])
    first, second = (each["other plugin"] for each in found)
    plugin = "  plugin tiny: axcore-tiny 1.0 on process 0; axcore-tiny 1.1 on process 1"
    assert first == second and first.splitlines()[1:] == [plugin]
    first, second = (each["other config"] for each in found)
    assert first == second and first.splitlines()[1:] == [plugin, *CONFIG_LINES]
    assert [path.name for path in tmp_path.iterdir()] == ["newer"]


def test_differences_list_the_processes_of_each_value():
    found = [{"a": "1", "b": "x"}] * 3 + [{"a": "2", "b": "x"}, {"b": "x", "c": "3"}] + [{"a": "1", "b": "x"}] * 9
    assert agreement.differences(found) == [
        "a: 1 on processes 0, 1, 2, 5, 6, 7, 8, 9 and 4 more; 2 on process 3; absent on process 4",
        "c: absent on processes 0, 1, 2, 3, 5, 6, 7, 8 and 5 more; 3 on process 4",
    ]


def test_facts_contain_versions_plugins_and_config_values(tiny):
    facts = agreement.facts(tiny)
    assert {"version of axcore", "version of jax", "version of flax", "plugin rope"} <= facts.keys()
    assert facts["model.dim"] == "16"
