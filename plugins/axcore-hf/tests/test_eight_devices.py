"""Loading weights into sharded arrays, in a process with eight CPU devices."""

import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long


def test_weights_have_the_shardings_of_the_model():
    script = pathlib.Path(__file__).with_name("eight_devices.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["llama", "mixtral"]
