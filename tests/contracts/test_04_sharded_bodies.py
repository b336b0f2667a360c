"""Contract 4: under `shard_map` each device holds only its own experts, and results equal those of one device."""

import numpy as np
import pytest

import axcore as ax
from axcore.testing.devices import on_devices

from .bodies import DIM, EXPERTS, HIDDEN, MESHES, ROUTINGS, ROWS, SEQ, lowered, main

pytestmark = pytest.mark.long

pytest.importorskip("axcore_moe")

PARTS = {"expert=8": 8, "expert=4, data=2": 4, "expert=4, fsdp=2": 8}


@pytest.fixture(scope="module")
def found():
    return on_devices(main)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("mesh", [*MESHES, "ragged", "fsdp=8"])
def test_exchange_gives_the_loss_and_gradients_of_one_device(found, mesh, routing):
    one, many = found["one"][routing], found[mesh][routing]
    assert many["dropped"] == 0
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6)
    assert many["gradients"].keys() == one["gradients"].keys()
    for path, gradient in one["gradients"].items():
        largest = np.abs(gradient).max()
        assert largest > 0, path
        np.testing.assert_allclose(many["gradients"][path], gradient, rtol=0, atol=1e-6 * largest, err_msg=path)


def test_ragged_arrays_are_sent_on_tpus_or_if_asked_for():
    assert "ragged_all_to_all" in lowered("tpu")
    assert "ragged_all_to_all" not in lowered("tpu", transport="padded")
    assert "ragged_all_to_all" not in lowered("tpu", dropless=False)
    assert "ragged_all_to_all" not in lowered("cpu")
    assert "ragged_all_to_all" in lowered("gpu", transport="ragged")
    with pytest.raises(ax.ConfigError, match=r'transport="ragged" drops nothing, so dropless=False requires'):
        lowered("tpu", transport="ragged", dropless=False)
    with pytest.raises(ax.ConfigError, match=r'requires a GPU or TPU, got a CPU\. Set transport="auto"'):
        lowered("cpu", transport="ragged")


def test_each_routing_uses_the_expected_experts(found):
    def fed(routing):
        gradient = found["one"][routing]["gradients"]["experts.up.weight"]
        return np.abs(gradient).sum(axis=(1, 2)) > 0

    assert fed("random").sum() > 12
    assert fed("four experts").nonzero()[0].tolist() == [0, 1, 2, 3]
    assert fed("one expert").nonzero()[0].tolist() == [0, 1]  # the first and second choice of every token


@pytest.mark.parametrize("mesh", PARTS)
def test_a_device_holds_only_its_own_experts(found, mesh):
    for path, (whole, held) in found[mesh]["bytes"].items():
        if path.startswith("experts.") and not path.endswith("bias"):
            assert held == [whole // PARTS[mesh]] * 8, path


@pytest.mark.parametrize("mesh", MESHES)
def test_no_device_gathers_the_experts_of_other_devices(found, mesh):
    text = found[mesh]["text"]
    assert "all-to-all" in text
    whole = [f"f32[{EXPERTS},{DIM},{HIDDEN}]", f"f32[{EXPERTS},{HIDDEN},{DIM}]", f"f32[{EXPERTS},{HIDDEN}]"]
    assert not [shape for shape in whole if shape in text]
    assert all(shape in found["one"]["text"] for shape in whole)


def test_without_an_expert_axis_each_device_computes_its_own_tokens(found):
    text, pairs = found["fsdp=8"]["text"], 2 * ROWS * SEQ
    assert "all-to-all" not in text
    assert f"f32[{pairs // 8},{DIM}]" in text
    assert f"[{pairs},{DIM}]" not in text


def test_limited_capacity_drops_pairs_and_reports_them(found):
    # Each device sends the 2 choices of its 6 tokens to one device, whose capacity is 12 / 8, rounded up to 2.
    assert found["bounded"]["one expert"]["dropped"] == pytest.approx(1 - 2 / 12)
    assert 0 < found["bounded"]["random"]["dropped"] < 0.5


def test_variables_with_axes_can_be_written_in_shard_map(found):
    it = found["remembered"]
    np.testing.assert_allclose(it["new"]["sums"], it["x"].sum(axis=1), rtol=1e-5, atol=1e-5)


def test_devices_sum_gradients_and_take_the_max_of_gradient_state(found):
    it = found["remembered"]
    x, scale = it["x"].astype(np.float64), it["scale"].astype(np.float64)
    params, state = it["gradients"]
    np.testing.assert_allclose(params["scale"], (2 * x**2 * scale).sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(state["amax"], np.abs(x * scale).max(), rtol=1e-6)
