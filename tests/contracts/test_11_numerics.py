"""Contract 11: numerics own the representation of a weight, its products, and state that gradients overwrite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import GradientState, functional, invoke, overwrite_with_gradient, to_fm32
from axcore.nn import Repeat
from axcore.numerics import Numerics, stored
from axcore.parallel import Mesh, Remat
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.models import by_path
from axcore.train import Checkpointer, CrossEntropy, Learner
from axcore.train.step.program import program

pytestmark = pytest.mark.long

LAYERS, HISTORY = 2, 3
SAW = "saw"
"""The name under which the probe reports its largest input."""


class Delayed(Numerics):
    """Delayed scaling: rounds to 255 levels, with a scale from the maxima of earlier steps."""

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.input = GradientState(jnp.zeros((HISTORY,)), axes=(None,))
        self.gradient = GradientState(jnp.zeros((HISTORY,)), axes=(None,))

    def __call__(self, x, weight, product):
        self.add_output(SAW, jnp.abs(x).max())
        x = rounded(x, self.input[...])
        return rounded_gradient(product(x, self.matrix(weight)), self.gradient[...])


def on_grid(x, history):
    largest = history.max()
    scale = jnp.where(largest > 0, largest, 1.0) / 127
    return jnp.clip(jnp.round(x / scale), -127, 127) * scale


def pushed(history, x):
    return jnp.roll(history, 1).at[0].set(jnp.abs(x).max())


@jax.custom_vjp
def rounded(x, history):
    return on_grid(x, history)


rounded.defvjp(lambda x, history: (on_grid(x, history), pushed(history, x)), lambda new, g: (g, new))


@jax.custom_vjp
def rounded_gradient(y, history):
    return y


rounded_gradient.defvjp(lambda y, history: (y, history), lambda history, g: (on_grid(g, history), pushed(history, g)))


def with_probe(model):
    return ax.select(model, lambda _, node: hasattr(node, "numerics")).set(numerics=Delayed.Config())


def step(cfg, state, batch, microbatches=1, chunk=None):
    """The model state after one training step from the parameters of seed 0."""
    layout = Mesh(shape={"data": 1}, rules={}).make(jax.devices()[:1])
    made = program(cfg, Learner.Config(), layout, CrossEntropy.Config(chunk=chunk), microbatches)
    before = made.init(jnp.uint32(0))
    before.model_state = jax.tree.map(jnp.array, state)
    return jax.device_get(made.compile_train(batch)(before, batch)[0].model_state)


def halves(seed):
    """Two microbatches."""
    ids = np.random.default_rng(seed).integers(0, 32, (4, 9))
    rows = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((4, 8), np.float32)}
    return [{name: x[half] for name, x in rows.items()} for half in (slice(2), slice(2, 4))]


def whole(microbatches):
    """The batch that the training step splits into these two microbatches: each gets every second row."""
    return {name: np.stack([each[name] for each in microbatches], 1).reshape(4, -1) for name in microbatches[0]}


def largest_seen(fn, params, state, microbatches):
    """The maximum of `seen` over two microbatches."""
    each = [seen(fn, params, state, batch) for batch in microbatches]
    return {path: np.maximum(each[0][path], each[1][path]) for path in each[0]}


def seen(fn, params, state, batch):
    """{path of a linear map: its largest input in a forward pass, per layer}."""
    model = fn.bind(params, state)
    outputs = invoke(model, batch["inputs"], capture=[f"**.{SAW}"])[1].outputs
    return {path.replace(".*", "").removesuffix(f".{SAW}"): np.asarray(value) for path, value in outputs.items()}


@pytest.mark.slow
def test_scan_remat_and_microbatches_update_a_history_once_per_step():
    cfg = ax.select(with_probe(tiny_model()), Repeat).set(remat=Remat())
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    first, second = halves(0), halves(1)
    one = step(cfg, state, whole(first), microbatches=2)
    expected = [largest_seen(fn, params, state, first), largest_seen(fn, params, one, second)]
    two = step(cfg, one, whole(second), microbatches=2)
    found_one, found_two = by_path(one), by_path(two)
    inputs = [path for path in found_two if path.endswith(".input") and not path.startswith("embedding.")]
    assert len(inputs) == 8
    for path in inputs:
        first_step, second_step = (each[path.removesuffix(".input")] for each in expected)
        zero = np.zeros_like(first_step)
        np.testing.assert_allclose(found_one[path], np.stack([first_step, zero, zero], -1), rtol=1e-5, err_msg=path)
        history = np.stack([second_step, first_step, zero], -1)
        np.testing.assert_allclose(found_two[path], history, rtol=1e-3, err_msg=path)
        gradient = found_two[path.replace(".input", ".gradient")]
        assert (gradient[..., :2] > 0).all() and not gradient[..., 2].any(), path
        assert gradient.shape == history.shape


@pytest.mark.slow
def test_a_history_keeps_the_maximum_over_repeated_calls():
    """A loss in four chunks calls the head four times. Summing over the calls would make the scale too coarse."""
    cfg = with_probe(tiny_model().set(head=None))
    state = functional(cfg.build(rngs=ax.Rngs(0)))[2]
    expected, found = (by_path(step(cfg, state, whole(halves(0)), chunk=chunk)) for chunk in (None, 2))
    for name in ("embedding.numerics.input", "embedding.numerics.gradient"):
        assert expected[name][0] > 0
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


def test_a_layer_that_no_loss_depends_on_keeps_its_history():
    _, _, state = functional(with_probe(tiny_model()).build(rngs=ax.Rngs(0)))
    state = jax.tree.map(jnp.ones_like, state)
    found = jax.jit(
        lambda state: overwrite_with_gradient(jax.grad(lambda _: 0.0, allow_int=True)(to_fm32(state)), state)
    )(state)
    for leaf in jax.tree.leaves(found):
        np.testing.assert_array_equal(leaf, np.ones_like(leaf))


def test_a_history_survives_the_checkpoint(tmp_path):
    cfg = with_probe(tiny_model())
    _, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    state = step(cfg, state, whole(halves(0)))
    with Checkpointer.Config().build(tmp_path) as checkpointer:
        checkpointer.save(1, {"params": params, "model_state": state}, data={}, meta={})
        restored = checkpointer.restore({"params": params, "model_state": state}).state
    assert by_path(state)["head.numerics.input"][0] > 0
    for path, leaf in by_path(restored["model_state"]).items():
        np.testing.assert_array_equal(leaf, by_path(state)[path])


class Codes(Numerics):
    """Weight-only quantization: int8 codes and a float32 scale for each output."""

    def encode(self, weight):
        scales = jnp.abs(weight).max(self.config.input_axis, keepdims=True).astype(jnp.float32) / 127
        return {"codes": jnp.round(weight / scales).astype(jnp.int8), "scales": scales}

    def decode(self, stored):
        return stored["codes"] * stored["scales"]

    def __call__(self, x, weight, product):
        if not isinstance(weight, dict):
            return product(x, weight)
        return product(x, weight["codes"]) * product.broadcast(weight["scales"].squeeze(self.config.input_axis))


def weight_bytes(params):
    """The total size of all weights in bytes."""
    return sum(leaf.nbytes for path, leaf in by_path(params).items() if "weight" in path.split("."))


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("experts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_stored_weights_are_codes_without_a_float_copy(tied, experts):
    cfg = tiny_model().set(dim=64)
    cfg = cfg.set(head=None) if tied else cfg
    cfg = ax.pipe(cfg, ax.use("moe", num_experts=4)) if experts else cfg
    cfg = ax.select(cfg, lambda _, node: hasattr(node, "numerics")).set(numerics=Codes.Config())
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    model, codes = stored(cfg, params)
    kept, _, other = functional(model.build(rngs=ax.Rngs(0)))

    floats = [path for path, leaf in by_path(codes).items() if leaf.dtype != jnp.int8 and "weight" in path.split(".")]
    assert floats and all(path.endswith("weight.scales") for path in floats)
    assert weight_bytes(codes) < 0.32 * weight_bytes(params)  # int8: 1/4, plus one scale for 16 or more numbers
    assert by_path(codes)["embedding.weight.codes"].dtype == jnp.int8
    if experts:
        assert by_path(codes)["decoder.layers.ffn.experts.up.weight.codes"].shape == (LAYERS, 4, 64, 24)

    ids = tiny_batch()["inputs"]
    expected = np.asarray(fn(params, state, ids)[0][0])
    found = np.asarray(jax.jit(lambda params: kept(params, other, ids)[0][0])(codes))
    assert 0 < np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


def test_decoding_uses_only_stored_codes():
    from axcore.infer import Decoder, Step
    from axcore.nn import ContiguousCache

    cfg = ax.select(tiny_model(), lambda _, node: hasattr(node, "numerics")).set(numerics=Codes.Config())
    model, codes = stored(cfg, functional(cfg.build(rngs=ax.Rngs(0)))[1])
    fn, _, other = functional(model.build(rngs=ax.Rngs(1)))
    decoder, params, state = Decoder.of(fn.bind(codes, other), cache=ContiguousCache.Config(), batch_size=2, max_len=8)
    kinds = {leaf.dtype.name for path, leaf in by_path(params).items() if path.endswith(".codes")}
    assert kinds == {"int8"} and weight_bytes(params) == weight_bytes(codes)
    ids = tiny_batch()["inputs"]
    logits, _ = jax.jit(decoder)(params, state, Step(ids, start=jnp.zeros((2,), jnp.int32)))
    expected = jax.jit(lambda codes: fn(codes, other, ids)[0][0])(codes)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_unsupported_storage_is_reported():
    with pytest.raises(ax.ConfigError, match="no numerics in the config can be converted"):
        stored(tiny_model(), {})
    cfg = with_probe(tiny_model())
    with pytest.raises(ax.ConfigError, match="no numerics in the config can be converted"):
        stored(cfg, {})
    with pytest.raises(ax.ConfigError, match=r"stored=True: Delayed has no stored representation"):
        ax.select(cfg, "head.numerics").set(stored=True).build(rngs=ax.Rngs(0))
    cfg = ax.select(tiny_model(), "head").set(numerics=Codes.Config())
    with pytest.raises(ax.AxcoreError, match=r"no entry at head; pass the parameters of a model with this config"):
        stored(cfg, {})
