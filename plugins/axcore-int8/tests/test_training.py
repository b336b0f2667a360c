"""Training in INT8: random numbers, scan, remat, microbatches, layouts, and adapters on stored weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.config import walk
from axcore.module import functional
from axcore.nn import Linear, Repeat, layers_of
from axcore.numerics import Numerics, calibrated, stored
from axcore.parallel import Mesh, Remat
from axcore.parallel.pipeline import OneForwardOneBackward
from axcore.plugin.features import use_text
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.devices import steps
from axcore.testing.models import by_path, objective
from axcore.train import Checkpointer, CrossEntropy, Learner, Trainer
from axcore.train.step.program import program
from axcore_int8 import product

pytestmark = pytest.mark.long

STOCHASTIC = {"weight_gradient": "int8", "rounding": "stochastic"}


def tiny(where=Linear, num_layers=2, **options):
    model = ax.select(tiny_model(), Repeat).set(num_layers=num_layers)
    return ax.use("int8", where=where, **options)(model)


def grads(cfg, key=0, **options):
    cfg = ax.select(cfg, Repeat).set(**options)
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    loss = lambda params: objective(fn, params, state, tiny_batch(), key=jax.random.key(key))  # noqa: E731
    return by_path(jax.device_get(jax.jit(jax.grad(loss))(params)))


def difference(found, exact):
    """The largest relative difference of a gradient."""
    assert found.keys() == exact.keys()
    return max(np.linalg.norm(found[path] - exact[path]) / np.linalg.norm(exact[path]) for path in exact)


def run(cfg, batch, count=1, microbatches=1):
    layout = Mesh(shape={"data": 1}, rules={}).make(jax.devices()[:1])
    made = program(cfg, Learner.Config(), layout, CrossEntropy.Config(), microbatches)
    state, step = made.init(jnp.uint32(0)), made.compile_train(batch)
    for _ in range(count):
        state, metrics = step(state, batch)
    return state, metrics


def test_each_layer_call_microbatch_and_step_draws_its_own_key(monkeypatch):
    seen = []
    exact = product.quantized, product.rounded

    def spied(function):
        def call(x, *rest):
            key = rest[-1] if rest and not isinstance(rest[-1], int) else None
            if key is not None:
                jax.debug.callback(lambda data: seen.append(tuple(np.asarray(data))), jax.random.key_data(key))
            return function(x, *rest)

        return call

    monkeypatch.setattr(product, "quantized", spied(exact[0]))
    monkeypatch.setattr(product, "rounded", spied(exact[1]))
    cfg = ax.select(tiny(**STOCHASTIC), Repeat).set(remat=Remat())
    run(cfg, tiny_batch(rows=4), count=2, microbatches=2)
    jax.effects_barrier()
    names = [path for path, node in walk(cfg) if getattr(node, "numerics", None) is not None]
    calls = sum(2 if "layers" in path else 1 for path in names)
    assert len(seen) == len(set(seen)) == 2 * 2 * 2 * calls  # operands, steps, microbatches


def test_scan_remat_and_unrolling_give_the_same_gradients():
    cfg = tiny(**STOCHASTIC)
    plain = grads(cfg, unroll=2)
    # A difference in rounding can move a code; other random numbers change the gradients by 0.02.
    for options in ({"unroll": 1}, {"unroll": 1, "remat": Remat()}):
        assert difference(grads(cfg, **options), plain) < 5e-3
    assert difference(grads(cfg, key=1, unroll=2), plain) > 1e-2
    assert difference(grads(tiny(weight_gradient="int8"), unroll=2), plain) > 1e-2


@pytest.mark.slow
def test_stochastic_gradients_are_unbiased():
    cfg = tiny(**STOCHASTIC)
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))

    @jax.jit
    @jax.vmap
    def each(key):
        return jax.grad(lambda params: objective(fn, params, state, tiny_batch(), key=key))(params)

    sample = by_path(jax.device_get(each(jax.random.split(jax.random.key(5), 256))))
    exact = grads(tiny(weight_gradient="float"))["head.weight"]  # no rounding: its cotangent comes from the loss
    mean, deviation = (getattr(sample["head.weight"], name)(0) for name in ("mean", "std"))
    assert (deviation > 0).mean() > 0.9
    forward = np.linalg.norm(mean - exact) / np.linalg.norm(exact)
    assert forward < 0.02  # the rounding of x and the sampling error
    one = np.linalg.norm(sample["head.weight"][0] - mean)
    assert np.linalg.norm(sample["head.weight"][:128].mean(0) - sample["head.weight"][128:].mean(0)) < 0.3 * one


@pytest.mark.slow
def test_microbatches_add_up():
    batch = tiny_batch(rows=4)
    one, two = (run(tiny(), batch, microbatches=count)[0] for count in (1, 2))
    for path, leaf in by_path(one.params).items():
        np.testing.assert_allclose(by_path(two.params)[path], leaf, atol=2e-3, err_msg=path)


@pytest.mark.slow
def test_training_in_int8_follows_training_in_floats():
    batch = tiny_batch(rows=8)
    float_loss = run(tiny_model(), batch, count=30)[1]["loss"]
    for options in ({}, {"weight_gradient": "int8"}, STOCHASTIC):
        loss = run(tiny(**options), batch, count=30)[1]["loss"]
        np.testing.assert_allclose(loss, float_loss, rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, STOCHASTIC], ids=["nearest", "stochastic"])
def test_layouts_give_the_same_gradients(options):
    """Sums of codes are exact, so only the rounding of floats between the products differs."""
    meshes = [
        Mesh(shape={"data": 1}),
        Mesh(shape={"data": 2, "fsdp": 4}),
        Mesh(shape={"fsdp": 2, "tensor": 4}),
        Mesh(shape={"pipeline": 2, "fsdp": 2, "tensor": 2}, pipeline=OneForwardOneBackward.Config()),
    ]
    model = ax.use("rope")(tiny(num_layers=4, **options))
    batch = jax.tree.map(np.asarray, tiny_batch(rows=32))
    one, *others = steps(model, batch, meshes, microbatches=[4] * 4)
    assert all(each["sharded"] for each in others)
    for mesh, found in zip(meshes[1:], others, strict=True):
        assert difference(found["updates"], one["updates"]) < 1e-4, mesh


@pytest.mark.slow
@pytest.mark.parametrize(("weight_gradient", "tolerance"), [("float", 1e-4), ("int8", 0.02)])
def test_experts_train_on_eight_devices(weight_gradient, tolerance):
    """Each device rounds the int8 gradients of its own rows, with its own scales, before they are added."""
    model = ax.use("moe", num_experts=4, balance=0.1)(tiny_model())
    model = ax.use("int8", where="**.ffn.experts.**", weight_gradient=weight_gradient)(model)
    meshes = [Mesh(shape={"data": 1}), Mesh(shape={"fsdp": 2, "expert": 4})]
    one, many = (each["updates"] for each in steps(model, jax.tree.map(np.asarray, tiny_batch(rows=16)), meshes))
    experts = {path for path in one if ".experts." in path}
    for paths, bound in ((experts, tolerance), (one.keys() - experts, 1e-4)):
        assert paths
        assert difference({path: many[path] for path in paths}, {path: one[path] for path in paths}) < bound


@pytest.mark.slow
def test_static_scales_survive_training_and_the_checkpoint(tmp_path):
    cfg = ax.select(tiny(activation_scales="static"), Repeat).set(remat=Remat())
    _, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    state = calibrated(cfg, params, state, [tiny_batch()["inputs"]])
    layout = Mesh(shape={"data": 1}, rules={}).make(jax.devices()[:1])
    made = program(cfg, Learner.Config(), layout, CrossEntropy.Config(), 2)
    before = made.init(jnp.uint32(0))
    before.model_state = jax.tree.map(jnp.array, state)
    after, metrics = made.compile_train(tiny_batch())(before, tiny_batch())
    assert np.isfinite(metrics["loss"])
    with Checkpointer.Config().build(tmp_path) as checkpointer:
        checkpointer.save(1, {"model_state": after.model_state}, data={}, meta={})
        restored = checkpointer.restore({"model_state": after.model_state}).state["model_state"]
    assert by_path(state)
    for path, leaf in by_path(state).items():
        np.testing.assert_array_equal(by_path(restored)[path], leaf)


@pytest.mark.parametrize(
    "numerics",
    ["int8:activation_scales=None", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "int4"))],
)
def test_adapters_train_on_stored_weights(numerics):
    """QLoRA (Dettmers et al. 2023, arXiv 2305.14314) with these number formats."""
    plain = ax.pipe(tiny_model(), use_text(f"{numerics}{',' if ':' in numerics else ':'}where=**.layers.**"))
    model = ax.select(plain, lambda _, node: isinstance(node, Numerics.Config)).set(stored=True)
    cfg = ax.use("lora", rank=4, where="model.decoder.**")(Trainer.Config(model=model))
    layout = Mesh(shape={"data": 1}, rules={}).make(jax.devices()[:1])
    made = program(cfg.model, cfg.learner, layout, CrossEntropy.Config(), 2)
    before = made.init(jnp.uint32(1))
    held = by_path(jax.device_get(before.params))
    step, batch, losses = made.compile_train(tiny_batch(rows=8)), tiny_batch(rows=8), []
    for _ in range(40):
        before, metrics = step(before, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.02
    after = by_path(jax.device_get(before.params))
    moved = {path for path, leaf in held.items() if leaf.tobytes() != after[path].tobytes()}
    assert moved == {path for path in held if ".adapter." in path} != set()
    assert {leaf.dtype.name for path, leaf in held.items() if path.endswith(".codes")} <= {"int8", "uint8"}


def test_default_layers():
    model = ax.select(tiny_model(), Repeat).set(num_layers=4)
    inner, every, groups = (
        modifier(model) for modifier in (ax.use("int8"), ax.use("int8", activation_scales=None), ax.use("int4"))
    )
    assert [filled(place.config) for place in layers_of(inner.decoder)] == [0, 7, 7, 0]
    for cfg in (every, groups):
        assert isinstance(cfg.decoder, Repeat.Config)  # unlike above, trained parameters keep their paths
        assert filled(cfg) == filled(cfg.decoder) == 7
    experts = ax.use("int4")(ax.use("moe", num_experts=4)(model)).decoder.layers.ffn
    assert experts.router.linear.numerics is None and filled(experts) == 3


def filled(cfg):
    return sum(getattr(node, "numerics", None) is not None for _, node in walk(cfg))


def test_each_expert_has_its_own_scales():
    model = ax.use("int8", where=Linear)(ax.use("moe", num_experts=4)(tiny_model()))
    _, params, _ = functional(model.build(rngs=ax.Rngs(0)))
    codes = by_path(stored(model, params)[1])
    assert codes["decoder.layers.ffn.experts.up.weight.scales"].shape == (2, 4, 1, 24)
