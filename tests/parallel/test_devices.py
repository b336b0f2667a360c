"""Meshes over several slices and hosts, with stand-ins for devices."""

import types

import jax
import numpy as np
import pytest

from axcore.config import ConfigError
from axcore.parallel import Mesh
from axcore.parallel.devices import device_mesh


def devices(groups, each, key="slice_index"):
    """Devices of several slices or hosts. Their ids alternate between the groups."""
    attributes = {"platform": "gpu", "device_kind": "stub", "process_index": 0, "slice_index": 0}
    return [types.SimpleNamespace(**attributes | {"id": n, key: n % groups}) for n in range(groups * each)]


def groups_in_mesh(sizes, slow, found, monkeypatch, key="slice_index"):
    """The group of each device, in the shape of the mesh."""
    monkeypatch.setattr(jax.sharding, "Mesh", lambda array, names, axis_types: array)
    mesh = device_mesh(sizes, slow, found)
    return np.vectorize(lambda device: getattr(device, key))(mesh)


def test_outermost_axes_span_the_slices(monkeypatch):
    found = groups_in_mesh({"data": 2, "fsdp": 4, "tensor": 2}, {}, devices(4, 4), monkeypatch)
    for data in range(2):
        for fsdp in range(4):
            assert set(found[data, fsdp]) == {2 * data + fsdp // 2}


def test_dcn_chooses_the_axes_that_span_the_slices(monkeypatch):
    found = groups_in_mesh({"data": 2, "fsdp": 4}, {"fsdp": 2}, devices(2, 4), monkeypatch)
    assert found.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]


def test_dcn_applies_to_hosts_if_there_is_one_slice(monkeypatch):
    found = groups_in_mesh(
        {"data": 2, "fsdp": 4}, {"fsdp": 2}, devices(2, 4, "process_index"), monkeypatch, "process_index"
    )
    assert found.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]


def test_factors_whose_product_is_not_the_number_of_slices_raise():
    with pytest.raises(ConfigError, match=r"in 4 slices, but mesh\.dcn={'fsdp': 2} does not multiply to 4"):
        device_mesh({"fsdp": 8}, {"fsdp": 2}, devices(4, 2))


def test_a_factor_that_does_not_divide_its_axis_raises():
    with pytest.raises(ConfigError, match=r"mesh\.dcn: fsdp=3 is not a divisor of the size of this axis, 4"):
        Mesh(shape={"fsdp": 4}, dcn={"fsdp": 3}).abstract(4, "cpu")
