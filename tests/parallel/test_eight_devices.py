"""A training step on meshes of eight devices, compared with one device."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.long

MESHES = ["data=8", "fsdp=8", "data=2, fsdp=4"]


@pytest.fixture(scope="session")
def results():
    root = pathlib.Path(__file__).parents[2]
    search = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": search}
    command = [sys.executable, "-m", "tests.parallel.eight_devices"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_loss_and_all_gradients_equal_one_device(results, mesh):
    one, many = results["one"], results[mesh]
    assert many["metrics"].keys() == one["metrics"].keys() >= {"loss", "z_loss", "gradient_norm"}
    for name, value in one["metrics"].items():
        np.testing.assert_allclose(many["metrics"][name], value, rtol=1e-5, err_msg=name)
    assert many["gradients"].keys() == one["gradients"].keys()
    for path, gradient in one["gradients"].items():
        np.testing.assert_allclose(many["gradients"][path], gradient, rtol=1e-5, atol=1e-6, err_msg=path)
        assert np.abs(gradient).max() > 1e-4, path


@pytest.mark.slow
def test_the_step_minimizes_the_whole_objective_including_z_loss(results):
    one = results["one"]
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in results["reference gradients"].values()))
    np.testing.assert_allclose(one["metrics"]["gradient_norm"], norm, rtol=1e-5)
    for path, gradient in results["reference gradients"].items():
        np.testing.assert_allclose(one["gradients"][path], gradient, rtol=1e-5, atol=1e-6, err_msg=path)


def test_initial_parameters_are_sharded_and_independent_of_the_mesh(results):
    one, many = results["initial"]["one"], results["initial"]["data=2, fsdp=4"]
    assert one.keys() == many.keys()
    for path, (values, shard) in many.items():
        np.testing.assert_allclose(values, one[path][0], rtol=1e-6, err_msg=path)
        assert 4 * np.prod(shard) == np.size(values), path


@pytest.mark.parametrize(("mesh", "parts"), [("data=8", 1), ("fsdp=8", 8), ("data=2, fsdp=4", 4)])
def test_each_device_holds_its_shard_of_every_parameter_after_the_step(results, mesh, parts):
    found = results[mesh]
    for path, shape in found["shapes"].items():
        shard = found["shards"][path]
        assert np.prod(shape) == parts * np.prod(shard), path
        split = [axis for axis in range(len(shape)) if shape[axis] != shard[axis]]
        assert len(split) == (parts > 1), path
        rows = path.endswith(("down.weight", "projection.weight")) and shape[-2] % parts == 0
        assert all(axis == len(shape) - 2 if rows else shape[axis] == 8 for axis in split), path  # rows, or embed


@pytest.mark.parametrize(("mesh", "rows"), [("one", 8), ("data=8", 1), ("fsdp=8", 1), ("data=2, fsdp=4", 1)])
def test_batches_are_sharded_over_data_and_fsdp(results, mesh, rows):
    assert results[mesh]["rows"] == rows


def test_an_axis_of_size_minus_one_takes_the_remaining_devices(results):
    assert results["data=8"]["mesh"] == {"data": 8, "fsdp": 1}
    assert results["fsdp=8"]["mesh"] == {"data": 1, "fsdp": 8}


def test_a_batch_that_is_not_divisible_raises(results):
    kind, message = results["odd batch"]
    assert kind == "ConfigError"
    assert "batch" in message
    assert "6" in message
    assert "8" in message


def test_a_parameter_that_is_not_divisible_raises_and_is_named(results):
    kind, message = results["narrow model"]
    assert kind == "ConfigError"
    assert "is not divisible" in message
    assert "weight" in message or "scale" in message
