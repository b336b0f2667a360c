"""FLOPs of jaxprs and traffic of compiled modules, compared with counts by hand."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from axcore.aot import Target
from axcore.aot.chips import CHIPS
from axcore.aot.flops import count_flops
from axcore.aot.lowering import lower
from axcore.aot.roofline import Estimate
from axcore.aot.traffic import Collective, Traffic, count_traffic
from axcore.nn import use_remat
from axcore.parallel import ByTag
from axcore.parallel.pipeline import OneForwardOneBackward, Op


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def flops(function, *shapes):
    return count_flops(jax.make_jaxpr(function)(*shapes))


def test_matrix_products_in_loops_and_their_gradients_are_counted():
    def loss(weights, x):
        layer = jax.checkpoint(lambda x, weight: (jnp.tanh(x @ weight), None))
        return jax.lax.scan(layer, x, weights)[0].sum()

    one = 2 * 3 * 8 * 8  # x [3, 8] @ [8, 8]
    weights, x = shape(10, 8, 8), shape(3, 8)
    assert flops(loss, weights, x).total == 10 * one
    # Forward, forward again, and two products in the backward pass.
    assert flops(jax.grad(loss), weights, x).by_dtype == {"float32": 10 * 4 * one}
    halves = (shape(*each.shape, dtype="bfloat16") for each in (weights, x))
    assert flops(loss, *halves).by_dtype == {"bfloat16": 10 * one}


def test_results_that_nothing_uses_do_not_count():
    def function(x, weight):
        unused = x @ weight @ weight
        return x @ weight if unused.shape == x.shape else unused

    assert flops(function, shape(3, 8), shape(8, 8)).total == 2 * 3 * 8 * 8


def test_microbatches_do_not_add_operations(tiny):
    """The gradient of a microbatch recomputes values that the policy keeps, and uses none of them."""
    model = use_remat(tiny.model, ByTag(save=("query", "key", "value", "heads", "gate", "up")))
    cfg = tiny.set(model=model, mesh=tiny.mesh.set(shape={"data": 1}))
    one, two = (lower(cfg.set(microbatches=count), Target.of("cpu-1")).traced.jaxpr for count in (1, 2))
    assert count_flops(two).total == count_flops(one).total


def test_products_of_float32_run_at_the_default_precision_of_jax():
    x = shape(8, 8)
    assert flops(jnp.matmul, x, x).by_dtype == {"float32": 2 * 8**3}
    highest = flops(functools.partial(jnp.matmul, precision="highest"), x, x)
    assert highest.by_dtype == {"float32_highest": 2 * 8**3}
    for chip in CHIPS:  # one pass over bfloat16 or TF32, and six passes over bfloat16 or the units for float32
        fast, slow = chip.peak["float32"], chip.peak["float32_highest"]
        assert (slow == fast / 6) if chip.platform == "tpu" else (slow < fast)


def test_the_body_of_a_shard_map_is_counted_for_every_shard():
    mesh = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    body = jax.shard_map(
        lambda x, y: x @ y, mesh=mesh, in_specs=(PartitionSpec("a"), PartitionSpec()), out_specs=PartitionSpec("a"),
        axis_names={"a"}, check_vma=False,
    )  # fmt: skip
    assert flops(body, shape(8, 16), shape(16, 4)).total == 2 * 8 * 16 * 4


def test_grouped_products_and_convolutions():
    sizes = shape(3, dtype="int32")
    grouped = flops(jax.lax.ragged_dot, shape(12, 8), shape(3, 8, 5), sizes)
    assert grouped.total == 2 * 12 * 8 * 5

    def both(x, groups, sizes):
        return jax.value_and_grad(lambda *args: jax.lax.ragged_dot(*args, sizes).sum(), argnums=(0, 1))(x, groups)

    assert flops(both, shape(12, 8), shape(3, 8, 5), sizes).total == 3 * grouped.total
    filtered = flops(lambda x, k: jax.lax.conv(x, k, (1,), "SAME"), shape(2, 6, 16), shape(4, 6, 3))
    assert filtered.total == 2 * (2 * 4 * 16) * 6 * 3


def test_a_cond_is_counted_as_its_larger_branch_and_opaque_calls_are_listed():
    def function(x, flag):
        y = jax.lax.cond(flag, lambda x: x @ x @ x, lambda x: x @ x, x)
        z = jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, y)
        return jax.ffi.ffi_call("opaque", jax.ShapeDtypeStruct(z.shape, z.dtype))(z)

    found = flops(function, shape(4, 4), shape(dtype="bool"))
    assert found.total == 3 * 2 * 4**3
    assert set(found.uncounted) == {"while", "opaque"}


TABLE = OneForwardOneBackward.Config().build().table(2, 4)


def test_a_tick_of_a_pipeline_is_counted_as_the_largest_operation_of_a_stage():
    tasks = [functools.partial(jax.lax.fori_loop, 0, count, lambda _, x: x @ x) for count in (0, 1, 5, 2)]

    def ticks(x, length):
        ops = jnp.arange(length) % 4
        return jax.lax.scan(lambda x, op: (jax.lax.switch(op, tasks, x @ x), None), x, ops)[0]

    def units(length, table):
        found = count_flops(jax.make_jaxpr(functools.partial(ticks, length=length))(shape(8, 8)), table)
        return found.total / (2 * 8**3)

    costs = np.array([0, 1, 5, 2])
    by_hand = costs[TABLE.op].max(axis=1).sum()
    assert units(TABLE.ticks, TABLE) == TABLE.ticks + by_hand < units(TABLE.ticks, None) == TABLE.ticks * (1 + 5)
    assert units(TABLE.ticks + 1, TABLE) == units(TABLE.ticks + 1, None)  # another loop
    assert sum(TABLE.together.values()) == TABLE.ticks and frozenset({Op.IDLE}) not in TABLE.together


def test_the_traffic_of_a_tick_is_that_of_the_largest_operation_of_a_stage():
    sizes = (1, 64, 256, 16)
    branches = "".join(
        f"""%b_{number} (x.{number}: f32[1024]) -> f32[{size}] {{
  %x.{number} = f32[1024]{{0}} parameter(0)
  ROOT %y.{number} = f32[{size}]{{0}} slice(%x.{number}), slice={{[0:{size}]}}
}}

"""
        for number, size in enumerate(sizes)
    )
    module = f"""HloModule jit_step, is_scheduled=true

{branches}%condition (state: (s32[], f32[1024])) -> pred[] {{
  %state = (s32[], f32[1024]{{0}}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %bound = s32[] constant({TABLE.ticks})
  ROOT %less = pred[] compare(%count, %bound), direction=LT
}}

%body (state.1: (s32[], f32[1024])) -> (s32[], f32[1024]) {{
  %state.1 = (s32[], f32[1024]{{0}}) parameter(0)
  %op = s32[] get-tuple-element(%state.1), index=0
  %x = f32[1024]{{0}} get-tuple-element(%state.1), index=1
  %task = f32[256]{{0}} conditional(%op, %x, %x, %x, %x), branch_computations={{%b_0, %b_1, %b_2, %b_3}}
  ROOT %next = (s32[], f32[1024]{{0}}) tuple(%op, %x)
}}

ENTRY %main (x.9: f32[1024]) -> f32[1024] {{
  %x.9 = f32[1024]{{0}} parameter(0)
  %first = s32[] constant(0)
  %state.2 = (s32[], f32[1024]{{0}}) tuple(%first, %x.9)
  %loop = (s32[], f32[1024]{{0}}) while(%state.2), condition=%condition, body=%body
  ROOT %last = f32[1024]{{0}} get-tuple-element(%loop), index=1
}}
"""
    mesh = SimpleNamespace(axis_names=("pipeline",), devices=np.array([SimpleNamespace(id=0)], dtype=object))

    def memory(table):
        return count_traffic(module, mesh, host_of=lambda device: 0, table=table).memory

    bytes_of = 2 * 4 * np.array(sizes)  # a slice is read and written
    assert memory(TABLE) == bytes_of[TABLE.op].max(axis=1).sum() < memory(None) == TABLE.ticks * 2 * 4 * 256


@pytest.mark.parametrize(("seconds", "step", "without_overlap"), [(0.5, 2.0, 2.5), (5.0, 5.0, 7.0)])
def test_the_estimate_with_and_without_overlap(seconds, step, without_overlap):
    """A second of products and one of memory traffic. The network is slower than the links of a host of 8."""
    chip = next(chip for chip in CHIPS if chip.kind == "h100")
    sent = {Collective("all-gather", ("fsdp",), True, 8): seconds * 0.75 * 8 * chip.network}
    moved = Traffic(memory=chip.bandwidth, elementwise=0.85 * chip.bandwidth, sent=sent)
    estimate = Estimate.of(chip, {"bfloat16": 0.68 * chip.peak["bfloat16"]}, moved, 0.5 * chip.peak["bfloat16"])
    assert (estimate.step, estimate.without_overlap) == pytest.approx((step, without_overlap))
    assert (estimate.mfu, estimate.mfu_bound) == pytest.approx((0.5 / step, 0.5 / max(1.0, 0.75 * seconds)))


MODULE = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%sliced (stack: f32[10,16,8], index: s32[]) -> f32[16,8] {
  %stack = f32[10,16,8]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,16,8]{2,1,0} dynamic-slice(%stack, %index, %zero, %zero), dynamic_slice_sizes={1,16,8}
  ROOT %flat = f32[16,8]{1,0} bitcast(%slice)
}

%all-reduce-scatter.1 (input: bf16[16,8]) -> bf16[4,8] {
  %input = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(0)
  %whole = bf16[16,8]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups={{0,2,4,6},{1,3,5,7}}
  %start = s32[] constant(0)
  ROOT %part = bf16[4,8]{1,0} dynamic-slice(%whole, %start, %start), dynamic_slice_sizes={4,8}
}

%condition (state: (s32[], f32[10,16,8])) -> pred[] {
  %state = (s32[], f32[10,16,8]{2,1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %bound = s32[] constant(10)
  ROOT %less = pred[] compare(%count, %bound), direction=LT
}

%body (state.1: (s32[], f32[10,16,8])) -> (s32[], f32[10,16,8]) {
  %state.1 = (s32[], f32[10,16,8]{2,1,0}) parameter(0)
  %count.1 = s32[] get-tuple-element(%state.1), index=0
  %stack.1 = f32[10,16,8]{2,1,0} get-tuple-element(%state.1), index=1
  %layer = f32[16,8]{1,0} fusion(%stack.1, %count.1), kind=kLoop, calls=%sliced, metadata={op_name="jit(f)/while (x)"}
  %gather-start = (f32[16,8], f32[16,32]) all-gather-start(%layer), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}
  %gather-done = f32[16,32]{1,0} all-gather-done(%gather-start)
  ROOT %next = (s32[], f32[10,16,8]{2,1,0}) tuple(%count.1, %stack.1)
}

ENTRY %main (x: f32[10,16,8], y: bf16[16,8]) -> f32[16,8] {
  %x = f32[10,16,8]{2,1,0} parameter(0)
  %y = bf16[16,8]{1,0} parameter(1)
  %first = s32[] constant(0)
  %fast = f32[1024]{0:T(1024)S(1)} iota(), iota_dimension=0
  %state.2 = (s32[], f32[10,16,8]{2,1,0}) tuple(%first, %x)
  %loop = (s32[], f32[10,16,8]{2,1,0}) while(%state.2), condition=%condition, body=%body
  %scattered = bf16[4,8]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  %total = f32[16,8]{1,0} all-reduce(%x), channel_id=2, replica_groups=mesh['left'=4,'right'=2] {'right'}, to_apply=%add
  ROOT %moved = f32[16,8]{1,0} collective-permute(%total), channel_id=3, source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
}
"""


def test_traffic_of_a_module():
    devices = np.array([SimpleNamespace(id=number) for number in range(8)], dtype=object).reshape(2, 2, 2)
    mesh = SimpleNamespace(axis_names=("data", "fsdp", "tensor"), devices=devices)
    found = count_traffic(MODULE, mesh, host_of=lambda device: device.id // 4)
    rows, one = 16 * 8 * 4, 4 * 8 * 2  # bytes of a layer, and of the scattered result
    assert found.sent == {
        Collective("all-gather", ("data", "fsdp"), True, 2): 10 * 3 / 4 * 4 * rows,
        Collective("reduce-scatter", ("data", "fsdp"), True, 2): 3 / 4 * 4 * one,
        Collective("all-reduce", ("tensor",), False, 2): 2 / 2 * rows,
        Collective("collective-permute", ("data",), True, 1): rows,
    }
    assert found.calls[Collective("all-gather", ("data", "fsdp"), True, 2)] == 10
    assert found.unknown_loops == 0
    # In the loop, the fusion reads and writes one layer, not the stack, and the gather reads 1 and writes 4 layers.
    once = 4 * one + one + 10 * rows + rows + rows + rows  # reduce-scatter, all-reduce and permute
    assert found.memory == pytest.approx(10 * ((2 * rows + 4) + rows + 4 * rows) + once)
