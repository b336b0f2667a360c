"""Pipeline schedules as tables, and what cannot be divided into stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import Rngs
from axcore.nn import MultiTokenPrediction, RingAttention, use_remat
from axcore.nn.transformer import Sequence
from axcore.parallel import ByTag, Mesh
from axcore.parallel.pipeline import GPipe, OneForwardOneBackward, Op, PipelineSchedule, Task, ZeroBubble
from axcore.testing.devices import on_devices
from axcore.testing.models import tiny_model
from axcore.train.step.learner import Learner
from axcore.train.step.pipeline.split import Backward, operations
from axcore.train.step.program import program

SCHEDULES = (GPipe, OneForwardOneBackward, ZeroBubble)


def table(schedule, stages, microbatches, chunks=1):
    return schedule.Config(chunks=chunks).build().table(stages, microbatches)


def simulate(table):
    """Runs a table on numbers: the input of microbatch m is m + 1, chunk c multiplies by the prime number of index c,
    and the gradient of the last output is 1. Returns the output of each microbatch and the gradient of each weight."""
    primes = (2, 3, 5, 7, 11, 13, 17, 19)
    stages, last = table.op.shape[1], table.op.shape[1] * table.chunks - 1
    buffers = {
        kind: np.full((stages, getattr(table, f"num_{kind}") + 1), np.nan) for kind in ("x", "g", "residuals", "stash")
    }
    outputs, gradients = {}, dict.fromkeys(range(last + 1), 0.0)
    for tick in range(table.ticks):
        sent = {"x": {}, "g": {}}
        for stage in range(stages):
            op, microbatch, own = (getattr(table, name)[tick, stage] for name in ("op", "microbatch", "chunk"))
            slot = {kind: getattr(table, kind)[tick, stage] for kind in buffers}
            chunk = own * stages + stage
            if op == Op.FORWARD:
                x = microbatch + 1.0 if chunk == 0 else buffers["x"][stage, slot["x"]]
                buffers["residuals"][stage, slot["residuals"]] = x
                sent["x"][stage] = x * primes[chunk]
                buffers["g"][stage, slot["g"]] = x * primes[chunk]
            elif op == Op.BACKWARD:
                g = buffers["g"][stage, slot["g"]]
                if chunk == last:
                    outputs[microbatch], g = g, 1.0
                buffers["stash"][stage, slot["stash"]] = g * buffers["residuals"][stage, slot["residuals"]]
                sent["g"][stage] = g * primes[chunk]
            elif op == Op.WEIGHT:
                gradients[chunk] += buffers["stash"][stage, slot["stash"]]
        for kind, step in (("x", 1), ("g", -1)):
            for stage in range(stages):
                arrived = sent[kind].get((stage - step) % stages, np.nan)
                buffers[kind][stage, getattr(table, f"{kind}_arrives")[tick, stage]] = arrived
    return outputs, gradients, np.prod(primes[: last + 1]), primes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"), [(2, 2, 1), (4, 9, 1), (2, 6, 2), (3, 5, 2), (2, 3, 4), (4, 8, 2)]
)
def test_a_table_computes_every_output_and_gradient(schedule, stages, microbatches, chunks):
    outputs, gradients, product, primes = simulate(table(schedule, stages, microbatches, chunks))
    assert outputs == {m: (m + 1) * product for m in range(microbatches)}
    inputs = microbatches * (microbatches + 1) / 2
    assert gradients == {chunk: inputs * product / primes[chunk] for chunk in gradients}


@pytest.mark.parametrize(
    ("schedule", "chunks", "idle", "num_residuals"),
    [
        (GPipe, 1, 12.7, 32),
        (OneForwardOneBackward, 1, 12.7, 8),
        (OneForwardOneBackward, 2, 6.8, 23),
        (OneForwardOneBackward, 4, 3.5, 39),
        (ZeroBubble, 1, 8.6, 8),
    ],
)
def test_idle_share_and_stored_activations_of_eight_stages(schedule, chunks, idle, num_residuals):
    found = table(schedule, 8, 32, chunks)
    assert (round(100 * found.idle, 1), found.num_residuals) == (idle, num_residuals)


@pytest.mark.parametrize("microbatches", [4, 16, 64])
def test_1f1b_stores_activations_of_as_many_microbatches_as_stages(microbatches):
    assert table(OneForwardOneBackward, 4, microbatches).num_residuals == 4


def forwards(*numbers):
    return tuple(Task(Op.FORWARD, number) for number in numbers)


def backwards(*numbers):
    return tuple(Task(op, number) for number in numbers for op in (Op.BACKWARD, Op.WEIGHT))


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (forwards(0, 1) + backwards(0), forwards(0, 1) + backwards(0, 1), "stage 0 lacks BACKWARD of microbatch 1"),
        (forwards(0, 1, 1) + backwards(0, 1), forwards(0, 1) + backwards(0, 1), "stage 0 has FORWARD of microbatch 1"),
        (forwards(1, 0) + backwards(0, 1), forwards(0, 1) + backwards(0, 1), r"stage 0 runs FORWARD .* \[1, 0\]"),
        (forwards(0, 1) + backwards(0, 1), forwards(0, 1) + backwards(1, 0), r"stage 1 runs BACKWARD .* \[1, 0\]"),
        (
            backwards(0, 1) + forwards(0, 1),
            forwards(0, 1) + backwards(0, 1),
            "deadlocks in tick 0: stage 0 waits to run BACKWARD .* until stage 0 has run FORWARD of microbatch 0",
        ),
    ],
)
def test_an_order_that_cannot_run_raises(first, last, message):
    class Wrong(PipelineSchedule):
        def order(self, stages, microbatches):
            return first, last

    with pytest.raises(ax.ConfigError, match=message):
        table(Wrong, 2, 2)


def test_an_order_for_another_number_of_stages_raises():
    class One(PipelineSchedule):
        def order(self, stages, microbatches):
            return (forwards(0, 1) + backwards(0, 1),)

    with pytest.raises(ax.ConfigError, match=r"One.order lists the tasks of 1 stages, but .* 'pipeline' has 2"):
        table(One, 2, 2)


def test_the_backward_pass_is_divided_without_a_repeated_product():
    random = np.random.default_rng(0)
    weights = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((3, 5), (5, 3))]
    x, g = (jnp.asarray(random.normal(size=(4, 3)), jnp.float32) for _ in range(2))

    def layer(weights, x):
        return x + jnp.tanh(x @ weights[0]) @ weights[1]

    _, pull = jax.vjp(layer, weights, x)
    leaves, form = jax.tree.flatten(pull)
    whole = operations(lambda leaves, g: jax.tree.leaves(jax.tree.unflatten(form, leaves)(g)), leaves, x)
    backward = Backward(whole, len(leaves), len(weights))
    products = [
        str(jax.make_jaxpr(part)(*args)).count("dot_general")
        for part, args in (
            (backward.inputs, (leaves, [g])),
            (backward.weights, (leaves, backward.inputs(leaves, [g])[1])),
        )
    ]
    gx, stash = backward.inputs(leaves, [g])
    assert products == [2, 2]
    for found, expected in zip((*backward.weights(leaves, stash), *gx), jax.tree.leaves(pull(g)), strict=True):
        np.testing.assert_array_equal(found, expected)


def temporary_bytes(microbatches):
    cfg = layers(4)
    found = []
    for schedule in (OneForwardOneBackward, GPipe):
        layout = Mesh(shape={"pipeline": 4}, pipeline=schedule.Config()).make(jax.devices()[:4])
        batch = {
            name: np.zeros((2 * microbatches, 64), dtype)
            for name, dtype in (("inputs", np.int32), ("targets", np.int32), ("weights", np.float32))
        }
        step = program(cfg, Learner.Config(), layout, microbatches=microbatches).lower_train(batch).compile()
        found.append(step.memory_analysis().temp_size_in_bytes)
    return found


@pytest.mark.slow
def test_with_more_microbatches_1f1b_only_stores_more_embeddings():
    few, many = on_devices(temporary_bytes, 4), on_devices(temporary_bytes, 16)
    embeddings = 2 * 64 * 16 * 4  # bytes of one microbatch
    assert many[0] - few[0] < 12 * 6 * embeddings
    assert many[1] - few[1] > 12 * 12 * embeddings


def build(model, microbatches=8, **mesh):
    layout = Mesh(**mesh).abstract(int(np.prod(list(mesh["shape"].values()))), "cpu")
    return program(model, Learner.Config(), layout, microbatches=microbatches)


def layers(count):
    return ax.select(tiny_model(), "decoder").set(num_layers=count)


@pytest.mark.parametrize(
    ("model", "microbatches", "mesh", "message"),
    [
        (layers(6), 8, {"pipeline": 4}, r"decoder has 6 layers, .* into 4 stages .*Nearest numbers of stages: 2, 3"),
        (layers(6), 3, {"pipeline": 6}, "microbatches=3 is less than the 6 stages"),
        (
            tiny_model().set(decoder=Sequence.Config(layers=(tiny_model().decoder.layers,))),
            8,
            {"pipeline": 2},
            "2 pipeline stages, but the model has no stack of equal layers",
        ),
    ],
)
def test_models_and_batches_that_stages_cannot_divide_raise(model, microbatches, mesh, message):
    with pytest.raises(ax.ConfigError, match=message):
        build(model, microbatches, shape=mesh)


def test_chunks_that_do_not_divide_the_layers_raise():
    with pytest.raises(ax.ConfigError, match=r"decoder has 6 layers, .* into 2 stages of 2 chunks each"):
        build(layers(6), shape={"pipeline": 2}, pipeline=OneForwardOneBackward.Config(chunks=2))


def test_only_the_longest_stack_is_divided():
    dense, experts = layers(3).decoder, layers(8).decoder
    model = layers(1).set(decoder=Sequence.Config(layers=(dense, experts)))
    axes = build(model, shape={"pipeline": 4, "fsdp": 2}).state.params["decoder"]["layers"]
    specs = [axes[index]["layers"]["ffn"]["up"]["weight"].sharding.spec for index in range(2)]
    assert [spec[0] for spec in specs] == [None, "pipeline"]


def test_a_remat_policy_that_offloads_values_raises():
    step = build(use_remat(layers(2), ByTag(offload=("heads",))), 2, shape={"pipeline": 2})
    with pytest.raises(ax.ConfigError, match="the remat policy of decoder offloads values to the host"):
        step.lower_train({name: np.zeros((2, 8), np.int32) for name in ("inputs", "targets", "weights")})


@pytest.mark.long
def test_ring_attention_in_stages_raises():
    mesh = {"shape": {"pipeline": 2, "context": 2}, "context": RingAttention.Config()}
    step = build(ax.pipe(layers(2), ax.use("rope")), 2, **mesh)
    message = r"ppermute inside the stages of the axis pipeline=2.*mesh.context=RingAttention with context=2"
    with pytest.raises(ax.ConfigError, match=message):
        step.lower_train({name: np.zeros((2, 8), np.int32) for name in ("inputs", "targets", "weights")})


def test_multi_token_prediction_in_a_stage_with_two_further_axes_raises():
    stage = Mesh(shape={"pipeline": 2, "fsdp": 2, "tensor": 2}).abstract(8, "cpu").inside({"pipeline"})
    module = MultiTokenPrediction.Config(input_dim=16, layer=tiny_model().decoder.layers).build(rngs=Rngs(0))
    with stage.active(), pytest.raises(ax.ConfigError, match=r"but the mesh has fsdp=2 and tensor=2. Set all but one"):
        module(None, None, None)
