"""Contract 3: losses are sums and counts, so that parts of a batch give the same result as the whole."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import GradientState, LossSum, current
from axcore.nn import Attention, CausalLM, FeedForward, Linear, MultiTokenPrediction, Repeat, TransformerLayer
from axcore.parallel import Mesh, Remat
from axcore.testing.devices import steps
from axcore.testing.models import by_path
from axcore.train import AdamW, CrossEntropy, Learner, Objective, Trainer, WarmupStableDecay
from axcore.train.data import ByteTokenizer, TextFiles, TextInput
from axcore.train.step.program import program

pytestmark = pytest.mark.long

VOCAB, ROWS, SEQ = 13, 8, 8
TOLERANCE = 1e-6


@jax.custom_vjp
def observed(y, history):
    return y


def _forward(y, history):
    return y, (y, history)


def _backward(kept, gradient):
    y, history = kept
    return gradient, jnp.roll(history, 1).at[0].set(jnp.abs(y).max())


observed.defvjp(_forward, _backward)


class Probe(ax.Layer):
    """An adapter that keeps a history of the largest absolute output, and adds a loss over tokens."""

    def __init__(self, cfg, *, rngs):
        self.history = GradientState(jnp.zeros((3,), jnp.float32))

    def __call__(self, x, y, weight, product):
        self.add_loss("size", jnp.sum(y.astype(jnp.float32) ** 2), y.shape[0] * y.shape[1], 0.01)
        self.add_summary("largest", jnp.abs(y).max(), ax.Reduce.MAX)
        return observed(y, self.history[...])


LAYER = TransformerLayer.Config(
    attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=12, down=Linear.Config())
)
PROBED = ax.select(LAYER, "ffn.down").set(adapter=Probe.Config())
PLAIN = CausalLM.Config(
    vocab_size=VOCAB,
    dim=8,
    decoder=Repeat.Config(num_layers=2, layers=LAYER, remat=Remat()),
    pad_vocab_to=8,
    future=(MultiTokenPrediction.Config(layer=LAYER),),
)
MODEL = ax.select(PLAIN, "decoder").set(layers=PROBED)
LOSS = CrossEntropy.Config(z_loss=0.1, label_smoothing=0.1)
CHUNKED = LOSS.set(chunk=5)
INPUT = TextInput.Config(source=TextFiles.Config(), tokenizer=ByteTokenizer.Config(), seq_len=SEQ, batch_size=ROWS)
LEARNER = Learner.Config(
    optimizer=AdamW.Config(eps=1.0),  # with a small eps, the first update is the sign of the gradient, even of noise
    schedule=WarmupStableDecay(peak=1.0, warmup_steps=1, decay=0.0),
    clip_norm=0.5,
)


def batch():
    """Packed rows of unequal weight. With four microbatches, the second has a total weight of zero."""
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
    weights = (random.random((ROWS, SEQ)) * (random.random((ROWS, SEQ)) < 0.7)).astype(np.float32)
    weights *= np.array([3, 0, 1, 0.1, 2, 0, 5, 1], np.float32)[:, None]
    segments = np.cumsum(random.random((ROWS, SEQ)) < 0.25, axis=1).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights, "segment_ids": segments}


@functools.cache
def compiled(microbatches, objective, model):
    made = program(model, LEARNER, Mesh().make(jax.devices()[:1]), objective, microbatches)
    return made, made.compile_train(batch())


@functools.cache
def trained(microbatches, objective=LOSS, model=MODEL):
    """[(metrics, state)] after each of two steps."""
    made, step = compiled(microbatches, objective, model)
    state, found = made.init(jnp.uint32(3)), []
    for _ in range(2):
        state, metrics = step(state, batch())
        found.append(jax.device_get((metrics, state)))
    return found


def assert_equal(found, expected, tolerance=TOLERANCE):
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        atol = tolerance * np.abs(np.asarray(value)).max()
        np.testing.assert_allclose(found[path], value, rtol=0, atol=atol, err_msg=path)


def gradients(state):
    """The gradients times 0.1: the first moments after the first step."""
    return {path: leaf for path, leaf in by_path(state.optimizer).items() if ".mu." in path}


@pytest.mark.parametrize(
    ("microbatches", "objective", "tolerance"),
    [
        (2, LOSS, TOLERANCE),
        pytest.param(4, LOSS, TOLERANCE, marks=pytest.mark.slow),
        pytest.param(2, CHUNKED, 2 * TOLERANCE, marks=pytest.mark.slow),  # its gradients are scaled, which rounds
    ],
    ids=["2", "4", "2, chunked"],
)
def test_microbatches_of_unequal_weight_equal_the_whole_batch(microbatches, objective, tolerance):
    (found, state), (expected, whole) = trained(microbatches, objective)[0], trained(1, objective)[0]
    assert {"loss", "z_loss", "label_smoothing", "future.0", "gradient_norm"} <= expected.keys()
    assert "decoder.layers.*.ffn.down.adapter.size" in expected
    assert_equal(found, expected, tolerance)
    assert_equal(gradients(state), gradients(whole), tolerance)
    assert_equal(by_path(state.params), by_path(whole.params), tolerance)


@pytest.mark.slow
def test_averaging_over_microbatches_would_be_wrong():
    """The weights of the rows differ enough to detect averaging over microbatches."""
    made, _ = compiled(1, LOSS, MODEL)
    start, objective, rows = made.init(jnp.uint32(3)), LOSS.build(), batch()
    params, state = start.params, start.model_state
    fields = {"key": jax.random.key(0), "training": True}
    halves = [
        objective.value(made.fn, params, state, {name: x[start::2] for name, x in rows.items()}, **fields)
        for start in (0, 1)
    ]
    whole = objective.value(made.fn, params, state, rows, **fields)
    assert abs(np.mean(halves) - whole) > 1e-3


@pytest.mark.parametrize("microbatches", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_scan_remat_and_microbatches_update_gradient_state_once(microbatches):
    metrics, (_, state) = zip(*trained(microbatches), strict=True)
    history = by_path(state.model_state)["decoder.layers.ffn.down.adapter.history"]
    largest = [each["decoder.layers.*.ffn.down.adapter.largest"] for each in metrics]
    expected = np.stack([largest[1], largest[0], np.zeros(2)], axis=1)
    np.testing.assert_allclose(history, expected, rtol=1e-6)
    assert not any("history" in path for path in by_path((state.optimizer, state.params)))


def test_counting_targets_first_adds_no_matrix_products():
    def products(microbatches):
        return len(re.findall(r" dot\(", compiled(microbatches, LOSS, MODEL)[1].as_text()))

    assert 0 < products(4) <= products(1)


class EachRow(Objective):
    """A third-party objective that weights all rows equally, whatever the weights of their targets."""

    class Config(Objective.Config):
        entropy: float = 0.0

    def __call__(self, model, batch):
        main, *_ = model.predictions(batch)
        log_p = jax.nn.log_softmax(model.logits(main.hidden))
        losses = -jnp.take_along_axis(log_p, main.targets[..., None], axis=-1)[..., 0]
        tokens = batch["weights"].sum(axis=1)
        means = (losses * batch["weights"]).sum(axis=1) / jnp.where(tokens == 0, 1.0, tokens)
        if self.config.entropy:
            entropy = -(jnp.exp(log_p) * log_p).sum()
            current().add_loss("entropy", entropy, losses.size, -self.config.entropy)
        return LossSum(means.sum(), (tokens > 0).sum())


class Distillation(Objective):
    """The divergence from a teacher whose probabilities are in the batch."""

    def __call__(self, model, batch):
        log_p = jax.nn.log_softmax(model.logits(model.predictions(batch)[0].hidden))[..., :VOCAB]
        divergence = (batch["teacher"] * (jnp.log(batch["teacher"]) - log_p)).sum(axis=-1)
        return LossSum((divergence * batch["weights"]).sum(), batch["weights"].sum())


@pytest.mark.slow
def test_a_third_party_objective_supports_microbatches():
    objective, model = EachRow.Config(entropy=0.01), PLAIN.set(future=())
    (found, state), (expected, whole) = (trained(count, objective, model)[0] for count in (4, 1))
    assert_equal(found, expected)
    assert_equal(gradients(state), gradients(whole))
    assert "entropy" in expected and "z_loss" not in expected
    assert expected["loss"] != pytest.approx(trained(1)[0][0]["loss"], rel=1e-3)


def test_a_batch_may_contain_arrays_for_the_objective_only():
    teacher = np.random.default_rng(1).dirichlet(np.ones(VOCAB), (ROWS, SEQ)).astype(np.float32)
    rows = batch() | {"teacher": teacher}
    cfg = Trainer.Config(
        model=PLAIN, input=INPUT, objective=Distillation.Config(), learner=LEARNER, steps=1, microbatches=2
    )
    made = cfg.build().program()
    state = made.init(jnp.uint32(0))
    total, count = made.compile_eval(rows)(state.params, state.model_state, rows)
    _, metrics = made.compile_train(rows)(state, rows)
    np.testing.assert_allclose(metrics["loss"], total / count, rtol=1e-6)
    assert metrics["loss"] > 0


@pytest.mark.slow
def test_sharded_microbatches_give_the_gradients_of_one_device():
    one = Mesh(shape={"data": 1}, rules={})
    context = {"batch": "data", "seq": "context"}
    meshes = {
        Mesh(shape={"data": 2, "context": 4}, rules=context): 1,
        Mesh(shape={"data": 2, "context": 2}, rules=context): 2,
        Mesh(shape={"data": 2, "fsdp": 2}): 2,
    }
    whole, *cut = steps(PLAIN, batch(), [one, *meshes], LOSS, [1, *meshes.values()])
    for found in cut:
        np.testing.assert_allclose(found["loss"], whole["loss"], rtol=TOLERANCE)
        assert_equal(found["updates"], whole["updates"])


def test_microbatches_that_do_not_divide_the_batch_are_rejected():
    cfg = Trainer.Config(model=PLAIN, input=INPUT, learner=LEARNER, steps=1, microbatches=3)
    message = r"input\.batch_size=8 cannot be split evenly into microbatches=3 .* multiple of 3, or set microbatches=2"
    with pytest.raises(ax.ConfigError, match=message):
        cfg.build().program().batch_shapes(batch())


class Mean(Objective):
    """An objective with an invalid return value."""

    def __call__(self, model, batch):
        return model.logits(model.predictions(batch)[0].hidden).mean()


def test_an_objective_that_returns_a_mean_is_rejected():
    made = program(PLAIN, LEARNER, Mesh().make(jax.devices()[:1]), Mean.Config())
    with pytest.raises(ax.ConfigError, match=r"objective: Mean must return a LossSum of two scalars"):
        made.compile_train(batch())
