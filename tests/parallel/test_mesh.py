"""Mesh shapes, rules and partition specs, on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from axcore.config import ConfigError
from axcore.nn import RingAttention
from axcore.parallel import STANDARD_RULES, Layout, Mesh, constrain, is_sharded
from axcore.parallel.pipeline import GPipe
from axcore.train.step.data_shards import shard_of_process

EIGHT = jax.devices()[:1] * 8  # no array is placed on them


def layout(rules=STANDARD_RULES, **sizes):
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


def test_case_a_mesh_without_axes_is_refused_on_one_device():
    with pytest.raises(ConfigError, match=r"mesh\.shape: \{\} does not match the number of cpu devices, which is 1"):
        Mesh(shape={}, rules={}).make(EIGHT[:1])


def test_case_a_mesh_with_too_few_devices_says_how_to_get_them():
    mesh = Mesh(shape={"data": 1, "fsdp": 8})
    message = r"mesh\.shape: \{.*\} does not match the number of cpu devices, which is 1\. Set sizes whose product is 1"
    with pytest.raises(
        ConfigError, match=rf"{message}, or select N CPU devices with --target cpu-N or JAX_NUM_CPU_DEVICES=N$"
    ):
        mesh.make(EIGHT[:1])
    with pytest.raises(ConfigError, match=r"the number of gpu devices, which is 4\. Set sizes whose product is 4$"):
        mesh.abstract(4, "gpu")


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device of a machine with several slices."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100"
    process_index: int = 0


@pytest.mark.parametrize(("shape", "spans"), [({"data": 2, "fsdp": 4}, 0), ({"data": 1, "fsdp": 8}, 1)], ids=str)
def test_case_one_axis_spans_the_slices_and_the_others_stay_within_a_slice(shape, spans):
    devices = [FakeDevice(id, slice_index=id % 2) for id in range(8)]  # in an order that mixes the slices
    grid = Mesh(shape=shape, rules={}).make(devices).mesh.devices
    slices = np.moveaxis(np.vectorize(lambda device: device.slice_index)(grid), spans, 0)
    assert grid.shape == tuple(shape.values()) and len(set(grid.flat)) == 8
    for half, index in ((slices[: len(slices) // 2], 0), (slices[len(slices) // 2 :], 1)):
        np.testing.assert_array_equal(half, index)


def test_case_slices_that_no_axis_can_span_are_named():
    devices = [FakeDevice(id, slice_index=id // 4) for id in range(10)]
    with pytest.raises(ConfigError, match=r"the devices are in 3 slices, but mesh\.shape={'data': 1"):
        Mesh(shape={"data": 1, "fsdp": 10}, rules={}).make(devices)


def test_a_rule_to_an_unknown_mesh_axis_raises_and_lists_the_axes():
    with pytest.raises(ConfigError, match=r"mesh\.rules: 'mlp' maps to 'tensr'.*Known: data, fsdp, pipeline, expert"):
        Mesh(rules={"mlp": "tensr"}).make(jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"'batch' maps to 'rows'"):
        Mesh(rules={"batch": ("data", "rows")}).make(jax.devices()[:1])


def test_the_standard_rules_serve_any_shape():
    for shape in ({"data": 8}, {"tensor": 2, "fsdp": 4}, {"expert": 8}):
        built = Mesh(shape=shape).abstract(8, "cpu")
        assert set(built.axes_of("batch")) == shape.keys() - {"tensor"}
        assert built.axes_of("mlp") == (("tensor",) if "tensor" in shape else ())


def test_the_order_of_mesh_axes_does_not_depend_on_the_order_of_the_shape():
    built = Mesh(shape={"tensor": 2, "mine": 1, "data": -1, "pipeline": 2}).abstract(8, "cpu")
    assert built.mesh.axis_names == ("pipeline", "data", "mine", "tensor")
    assert built.mesh.axis_sizes == (2, 2, 1, 2)


def test_seq_uses_a_mesh_axis_only_if_no_other_dimension_does():
    shards = Mesh(shape={"context": 2, "tensor": 4}, rules={"seq": ("context", "tensor"), "head": "tensor"})
    built = shards.abstract(8, "cpu")
    assert built.spec(("batch", "seq", "embed_activation")) == PartitionSpec(None, ("context", "tensor"), None)
    assert built.spec(("batch", "seq", "head", None)) == PartitionSpec(None, "context", "tensor", None)
    assert built.spec(("batch", "seq", "head", None), (1, 8, 2, 8)) == PartitionSpec(None, "context", None, None)


def test_axes_of_an_enclosing_shard_map_are_not_used_again():
    outer = layout(pipeline=2, fsdp=4).inside({"pipeline"})
    assert outer.automatic == ("fsdp",)
    assert outer.num_shards == 4
    assert outer.spec(("batch", "embed")) == PartitionSpec("fsdp", None)
    assert outer.inside(("fsdp",)).spec(("batch", "embed")) == PartitionSpec(None, None)


@pytest.mark.parametrize("shape", [{"data": "8"}, {"data": 1.5}, {"data": True}, [1]], ids=str)
def test_a_shape_of_the_wrong_type_raises(shape):
    with pytest.raises(ConfigError, match=r"Mesh\.shape must be"):
        Mesh(shape=shape)


def test_a_rule_with_a_mesh_axis_twice_raises():
    with pytest.raises(ConfigError, match="fsdp"):
        Mesh(rules={"batch": ("fsdp", "fsdp")}).make(jax.devices()[:1])


def test_the_default_mesh_works_on_one_device():
    built = Mesh().make(jax.devices()[:1])
    assert dict(built.mesh.shape) == {"data": 1, "fsdp": 1}
    assert built.mesh.axis_types == (AxisType.Auto, AxisType.Auto)


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


@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        (("mlp", "embed"), (16, 8), PartitionSpec(("tensor", "fsdp"), None)),
        (("layer", "head", "embed"), (3, 16, 8), PartitionSpec(None, ("tensor", "fsdp"), None)),
        (("mlp", "embed"), (6, 8), PartitionSpec("tensor", "fsdp")),  # 6 rows are not divisible by 4
        (("embed", "mlp"), (8, 16), PartitionSpec("fsdp", "tensor")),
        (("vocab", "embed"), (16, 8), PartitionSpec("tensor", "fsdp")),
    ],
    ids=str,
)
def test_output_projections_are_sharded_by_rows(axes, shape, spec):
    built = Mesh(shape={"fsdp": 2, "tensor": 2}).make(EIGHT[:4])
    assert built.variable_spec(axes, shape) == spec


def test_a_parameter_that_is_not_divisible_raises_with_shape_and_axes():
    shapes = {"a": {"w": jax.ShapeDtypeStruct((6, 3), jnp.float32)}}
    with pytest.raises(ConfigError) as error:
        layout().shardings(shapes, {"a": {"w": ("embed", "mlp")}})
    assert "a.w: its dimension 'embed' of size 6 is not divisible by 4" in str(error.value)
    assert "(fsdp=4). The nearest possible products are 3 or 6" in str(error.value)


def test_rules_by_path_replace_the_general_rules():
    shapes = {"a": {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}, "b": jax.ShapeDtypeStruct((4,), jnp.float32)}
    built = Mesh(shape={"fsdp": 4}, parameters={"a.*": {"mlp": "fsdp"}, "b": {}}).abstract(4, "cpu")
    built.check_parameters(["a.w", "b"])
    found = built.shardings(shapes, {"a": {"w": ("embed", "mlp")}, "b": ("embed",)})
    assert found["a"]["w"].spec == PartitionSpec(None, "fsdp")
    assert found["b"].spec == PartitionSpec(None)
    with pytest.raises(ConfigError, match=r"mesh\.parameters: 'b' matches no parameter"):
        built.check_parameters(["a.w"])
    with pytest.raises(ConfigError, match=r"mesh\.parameters\['b'\]: 'embed' maps to 'tp'"):
        Mesh(shape={"fsdp": 4}, parameters={"b": {"embed": "tp"}}).abstract(4, "cpu")


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
    ("blocks", "shards"),
    [
        ({0: {0, 1}, 1: {2, 3}}, {0: (0, 2), 1: (1, 2)}),
        ({0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}}, {0: (0, 1), 1: (0, 1)}),
        ({0: {2, 3}, 1: {0, 1}, 2: {0, 1}, 3: {2, 3}}, {0: (1, 2), 1: (0, 2), 3: (1, 2)}),
    ],
    ids=["data", "tensor", "both"],
)
def test_processes_with_the_same_rows_read_the_same_shard(blocks, shards):
    assert {process: shard_of_process(blocks, process, 4) for process in shards} == shards


@pytest.mark.parametrize("blocks", [{0: {0, 2}, 1: {1, 3}}, {0: {0}, 1: {1, 2, 3}}, {0: {1, 2}, 1: {0, 3}}], ids=str)
def test_rows_that_are_not_consecutive_in_a_process_raise(blocks):
    with pytest.raises(ConfigError, match=r"mesh: of the 4 blocks of rows .* the devices of process"):
        shard_of_process(blocks, 0, 4)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            {"pipeline": GPipe.Config()},
            r"mesh\.pipeline: GPipe has no effect, .* no axis pipeline\. Attach it with use",
        ),
        ({"context": RingAttention.Config()}, r"mesh\.context: RingAttention has no effect, .* no axis context\."),
    ],
)
def test_a_strategy_requires_its_axis(strategy, message):
    with pytest.raises(ConfigError, match=message):
        Mesh(shape={"data": 2, "fsdp": 4}, **strategy).make(EIGHT)
    (axis,) = strategy
    Mesh(shape={"fsdp": 4, axis: 2}, **strategy).make(EIGHT)
