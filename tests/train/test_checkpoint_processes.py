"""Two processes save and restore together, and an error of one is raised on both."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.config import AxcoreError
from axcore.train import Checkpointer

from .checkpoint_processes import values

pytestmark = pytest.mark.long
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two") / "checkpoints"


@pytest.fixture(scope="module")
def found(folder):
    """The results and errors of each process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "XLA_FLAGS": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.train.checkpoint_processes", str(process), port, str(folder)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        done = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(err for _, err in done)
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def test_two_processes_save_keep_and_restore_their_shards(found):
    for each in found:
        assert each["steps"] == [2, 3] and each["exact"] and each["data"] == {"position": 3}
        assert each["at last"] == [3, 4]


@pytest.mark.parametrize(
    ("fault", "on", "reason"),
    [
        ("record", 0, "File too large"),
        ("arrays of 1", 1, "File too large"),
        ("inventory", 0, "No space left on device"),
        ("commit", 0, "FileExistsError: Cannot rename .*"),
    ],
)
def test_a_failed_save_is_raised_on_both_and_is_not_the_latest(found, folder, fault, on, reason):
    own, other = (found[process][fault] for process in (on, 1 - on))
    what = f"cannot write checkpoint {re.escape(str(folder / '4'))}"
    assert re.fullmatch(f"AxcoreError: {what}: {reason}", own[0])
    assert re.fullmatch(f"PeerFailed: {what}: process {on} of 2 failed: {reason}", other[0])
    assert own[1] == other[1] == 3


def test_case_folder_and_damage_errors_are_raised_on_both(found, folder):
    first, second = (each["folder"] for each in found)
    assert first == f"AxcoreError: cannot write checkpoint {folder}/a_file/checkpoints/1: Not a directory"
    assert second == f"PeerFailed: process 0 of 2 failed: {first.partition(': ')[2]}"
    for each in found:
        assert re.search(r"/4 is damaged \(state/ocdbt\.process_1/d/.*checksum differs", each["damage"])


def test_a_missing_process_is_named_after_the_timeout(found):
    assert found[0]["late"].startswith("RuntimeTimeout: process 0 of 2 waited 2 s at 'restore-4' for process 1,")


def test_one_process_restores_and_checks_a_checkpoint_of_two(found, folder):
    expected = values(4)
    wanted = {name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for name, leaf in expected.items()}
    with Checkpointer.Config().build(folder) as checkpointer:
        restored = checkpointer.restore(wanted, 4).state
        for name, leaf in expected.items():
            np.testing.assert_array_equal(restored[name], leaf.astype(np.float32))
        for path in sorted((folder / "4/state").rglob("d/*")):
            content = path.read_bytes()
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
            with pytest.raises(AxcoreError, match=f"4 is damaged .*{path.name}"):
                checkpointer.restore(wanted, 4)
            path.write_bytes(content)
