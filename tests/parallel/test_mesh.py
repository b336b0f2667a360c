"""Mesh shapes, rules and partition specs, on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from axcore.config import ConfigError
from axcore.parallel import FSDP_RULES, Layout, Mesh, Remat, SaveMatmuls, SaveNames, constrain, is_sharded

EIGHT = jax.devices()[:1] * 8  # no array is placed on them


def layout(rules=FSDP_RULES, **sizes):
    sizes = sizes or {"data": 2, "fsdp": 4}
    return Layout(AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), rules)


@pytest.mark.parametrize(
    "shape",
    [
        {"data": 3},
        {"data": 16},
        {"data": 2, "fsdp": 2},
        {"data": -1, "fsdp": 3},
        {"data": -1, "fsdp": -1},
        {},
    ],
    ids=str,
)
def test_a_shape_that_does_not_fill_the_devices_raises(shape):
    with pytest.raises(ConfigError, match=r"mesh\.shape: .*devices, which is 8"):
        Mesh(shape=shape, rules={}).make(EIGHT)


def test_case_a_mesh_with_too_few_devices_says_how_to_get_them():
    mesh = Mesh(shape={"data": 1, "fsdp": 8})
    message = r"mesh\.shape: \{.*\} does not match the number of cpu devices, which is 1\. Set sizes whose product is 1"
    with pytest.raises(ConfigError, match=rf"{message}, or split the CPU into N devices with JAX_NUM_CPU_DEVICES=N$"):
        mesh.make(EIGHT[:1])
    with pytest.raises(ConfigError, match=r"the number of gpu devices, which is 4\. Set sizes whose product is 4$"):
        mesh.abstract(4, "gpu")


@dataclasses.dataclass(frozen=True)
class InSlice:
    """A device of a machine with several slices."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100"
    process_index: int = 0


@pytest.mark.parametrize(
    ("shape", "spans"), [({"data": 2, "fsdp": 4}, 0), ({"fsdp": 4, "data": 2}, 0), ({"data": 1, "fsdp": 8}, 1)], ids=str
)
def test_case_one_axis_spans_the_slices_and_the_others_are_inside(shape, spans):
    devices = [InSlice(id, slice_index=id % 2) for id in range(8)]  # in an order that mixes the slices
    grid = Mesh(shape=shape, rules={}).make(devices).mesh.devices
    slices = np.moveaxis(np.vectorize(lambda device: device.slice_index)(grid), spans, 0)
    assert grid.shape == tuple(shape.values()) and len(set(grid.flat)) == 8
    for half, index in ((slices[: len(slices) // 2], 0), (slices[len(slices) // 2 :], 1)):
        np.testing.assert_array_equal(half, index)


def test_case_slices_that_no_axis_can_span_are_named():
    devices = [InSlice(id, slice_index=id // 4) for id in range(10)]
    with pytest.raises(ConfigError, match=r"mesh\.shape: the devices are in 3 slices, but no size of \{'data': 1"):
        Mesh(shape={"data": 1, "fsdp": 10}, rules={}).make(devices)


def test_a_rule_to_an_unknown_mesh_axis_raises_and_lists_the_axes():
    with pytest.raises(
        ConfigError, match=r"mesh\.rules: 'mlp' maps to 'tensor', which is not an axis of the mesh: data, fsdp"
    ):
        Mesh(rules={"mlp": "tensor"}).make(jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"'batch' maps to 'expert'"):
        Mesh(rules={"batch": ("data", "expert")}).make(jax.devices()[:1])


@pytest.mark.parametrize("shape", [{"data": "8"}, {"data": 1.5}, {"data": True}, [1]], ids=str)
def test_a_shape_of_the_wrong_type_raises(shape):
    with pytest.raises(ConfigError, match=r"Mesh\.shape must be"):
        Mesh(shape=shape)


def test_a_rule_with_a_mesh_axis_twice_raises():
    with pytest.raises(ConfigError, match="fsdp"):
        Mesh(rules={"batch": ("fsdp", "fsdp")}).make(jax.devices()[:1])


def test_the_default_mesh_works_on_one_device():
    made = Mesh().make(jax.devices()[:1])
    assert dict(made.mesh.shape) == {"data": 1, "fsdp": 1}
    assert made.mesh.axis_types == (AxisType.Auto, AxisType.Auto)


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ((), PartitionSpec()),
        (("embed",), PartitionSpec("fsdp")),
        (("embed", "mlp"), PartitionSpec("fsdp", None)),
        ((None, "embed"), PartitionSpec(None, "fsdp")),
        (("layer", "embed", "mlp"), PartitionSpec(None, "fsdp", None)),
        (("batch", "seq"), PartitionSpec(("data", "fsdp"), None)),
        (("batch", "embed"), PartitionSpec(("data", "fsdp"), None)),
        (("embed", "batch"), PartitionSpec("fsdp", "data")),
        (("embed", "embed"), PartitionSpec("fsdp", None)),
        (("unheard_of",), PartitionSpec(None)),
    ],
    ids=str,
)
def test_logical_axes_map_to_mesh_axes_that_are_used_once(axes, spec):
    assert layout().spec(axes) == spec


def test_shardings_follow_the_axes_of_each_parameter():
    shapes = {"a": {"w": jax.ShapeDtypeStruct((8, 3), jnp.float32)}, "b": jax.ShapeDtypeStruct((4,), jnp.float32)}
    found = layout().shardings(shapes, {"a": {"w": ("embed", None)}, "b": (None,)})
    assert found["a"]["w"].spec == PartitionSpec("fsdp", None)
    assert found["b"].spec == PartitionSpec(None)


def test_a_parameter_that_does_not_divide_raises_with_shape_and_axes():
    shapes = {"a": {"w": jax.ShapeDtypeStruct((6, 3), jnp.float32)}}
    with pytest.raises(ConfigError) as error:
        layout().shardings(shapes, {"a": {"w": ("embed", "mlp")}})
    for part in ("a.w", "(6, 3)", "('embed', 'mlp')", "fsdp", "is not divisible"):
        assert part in str(error.value)


def test_constrain_does_nothing_without_a_layout_and_on_one_device():
    x = jnp.ones((2, 3))
    assert constrain(x, "batch", "embed") is x
    with Mesh().make(jax.devices()[:1]).active():
        assert not is_sharded()
        assert constrain(x, "batch", "embed") is x


def test_a_layout_is_inactive_after_its_block_even_if_it_raises():
    assert not is_sharded()
    with pytest.raises(RuntimeError, match="inside"), layout().active():
        assert is_sharded()
        raise RuntimeError("inside")
    assert not is_sharded()


@pytest.mark.parametrize(
    ("remat", "recomputed"), [(None, 1), (Remat(), 2), (SaveMatmuls(), 1), (SaveNames(names=("kept",)), 1)], ids=repr
)
def test_a_remat_policy_determines_how_often_a_product_is_computed(remat, recomputed):
    def block(x, w):
        return jnp.sin(checkpoint_name(jnp.sin(x) @ w, "kept"))

    wrapped = block if remat is None else jax.checkpoint(block, policy=remat.policy())
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x, w: wrapped(x, w).sum()))(jnp.ones((2, 3)), jnp.ones((3, 3))))
    assert jaxpr.count("dot_general[") - 1 == recomputed  # one product belongs to the gradient of x


def test_save_names_keeps_only_the_given_names():
    def block(x, w):
        return jnp.sin(checkpoint_name(jnp.sin(x) @ w, "kept"))

    wrapped = jax.checkpoint(block, policy=SaveNames(names=("other",)).policy())
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: wrapped(x, w).sum()))(x))
    assert jaxpr.count("dot_general[") == 3
    expected = jax.grad(lambda x: block(x, w).sum())(x)
    np.testing.assert_allclose(jax.grad(lambda x: wrapped(x, w).sum())(x), expected, rtol=1e-6)
