"""The rule of the chunked loss: formulas in float64, the number of products, memory, and collectives."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import Reduce, abstract
from axcore.nn import CausalLM, Linear, Prediction, Repeat, Sequence
from axcore.parallel import Mesh, Remat
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.devices import on_devices, steps
from axcore.train import CrossEntropy, Learner
from axcore.train.step.program import program

pytestmark = pytest.mark.long

ROWS, SEQ, DIM, VOCAB = 2, 6, 4, 11
RANDOM = np.random.default_rng(0)
HIDDEN = RANDOM.normal(size=(ROWS, SEQ, DIM)).astype(np.float32)
WEIGHT = RANDOM.normal(size=(DIM, VOCAB)).astype(np.float32)
TARGETS = RANDOM.integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32)
WEIGHTS = (RANDOM.random((ROWS, SEQ)) * (RANDOM.random((ROWS, SEQ)) < 0.7)).astype(np.float32)
Z_LOSS, SMOOTHING, SOFTCAP, SCALE = 0.1, 0.2, 3.0, 0.7


class Head(ax.Layer):
    """A model whose hidden states are the inputs."""

    class Config(ax.Layer.Config):
        head: Linear.Config = Linear.Config(input_dim=DIM, output_dim=VOCAB)

    def __init__(self, cfg, *, rngs):
        self.head = self.child("head", cfg.head, rngs)

    @ax.module.method
    def predictions(self, batch):
        return (Prediction("next", batch["hidden"], batch["targets"], batch["weights"]),)

    @ax.module.method
    def logits(self, hidden):
        return SOFTCAP * jnp.tanh(SCALE * self.head(hidden).astype(jnp.float32) / SOFTCAP)


def by_formula():
    """Loss, its gradients by hidden states, weight and token weights (without those of the count) in float64."""
    hidden, weight, weights = (x.astype(np.float64) for x in (HIDDEN, WEIGHT, WEIGHTS))
    squashed = np.tanh(SCALE * hidden @ weight / SOFTCAP)
    logits = SOFTCAP * squashed
    log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
    one_hot = np.eye(VOCAB)[TARGETS]
    target = (1 - SMOOTHING) * one_hot + SMOOTHING / VOCAB
    losses = (log_z - (target * logits).sum(-1, keepdims=True) + Z_LOSS * log_z**2)[..., 0]
    p = np.exp(logits - log_z)
    slope = (p - target + 2 * Z_LOSS * log_z * p) * weights[..., None] / weights.sum()
    slope = slope * SCALE * (1 - squashed**2)
    return (losses * weights).sum() / weights.sum(), slope @ weight.T, np.einsum("bsd,bsv->dv", hidden, slope)


@pytest.mark.parametrize("chunk", [None, 1, 5, 12, 100])
def test_loss_and_gradients_follow_the_formula(chunk):
    fn, _, _ = abstract(Head.Config())
    objective = CrossEntropy.Config(z_loss=Z_LOSS, label_smoothing=SMOOTHING, chunk=chunk).build()

    def value(weight, hidden, factor):
        batch = {"hidden": hidden, "targets": TARGETS, "weights": WEIGHTS}
        return factor * objective.value(fn, {"head": {"weight": weight}}, {}, batch)

    for factor in (1.0, -3.7):  # any cotangent
        found = jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(WEIGHT, HIDDEN, factor)
        loss, of_hidden, of_weight = by_formula()
        np.testing.assert_allclose(found[0], factor * loss, rtol=1e-6)
        np.testing.assert_allclose(found[1][0], factor * of_weight, rtol=1e-5, atol=1e-7 * abs(factor))
        np.testing.assert_allclose(found[1][1], factor * of_hidden, rtol=1e-5, atol=1e-7 * abs(factor))


@pytest.mark.parametrize("chunk", [None, 5])
def test_the_gradient_of_token_weights_is_the_loss_of_each_token(chunk):
    fn, _, _ = abstract(Head.Config())
    objective = CrossEntropy.Config(chunk=chunk).build()

    def total(weights):
        batch = {"hidden": HIDDEN, "targets": TARGETS, "weights": weights}
        return fn({"head": {"weight": WEIGHT}}, {}, batch, method=objective)[0][0].total

    logits = SOFTCAP * np.tanh(SCALE * HIDDEN.astype(np.float64) @ WEIGHT / SOFTCAP)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, TARGETS[..., None], -1)[..., 0]
    weights = np.where(WEIGHTS == 0, 0.5, WEIGHTS).astype(np.float32)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(weights), losses, rtol=1e-5)


def test_gradients_of_bfloat16_are_summed_in_float32():
    """1024 equal terms: a sum in bfloat16 would stop growing after 256 of them."""
    head = Linear.Config(input_dim=DIM, output_dim=VOCAB, dtypes=ax.DTypes(compute="bfloat16"))
    fn, _, _ = abstract(Head.Config(head=head))
    batch = {"hidden": np.ones((1, 1024, DIM), np.float32), "targets": np.zeros((1, 1024), np.int32)}
    batch["weights"] = np.ones((1, 1024), np.float32)

    def gradient(chunk):
        objective = CrossEntropy.Config(chunk=chunk).build()
        value = jax.grad(lambda weight: objective.value(fn, {"head": {"weight": weight}}, {}, batch))
        return jax.jit(value)(np.zeros((DIM, VOCAB), np.float32))

    np.testing.assert_allclose(gradient(1)[:, 1:], SCALE / VOCAB, rtol=1e-2)


def products(text, size):
    """The number of matrix products with a dimension of this size in a compiled program."""
    lines = [line for line in text.splitlines() if re.search(r" dot\(", line)]
    shapes = {match: shape for match, shape in re.findall(r"(%[\w.-]+) = \w+\[([\d,]*)\]", text)}
    found = 0
    for line in lines:
        names = re.findall(r"%[\w.-]+", line)[:3]
        found += any(str(size) in shapes.get(name, "").split(",") for name in names)
    return found


@pytest.mark.parametrize("remat", [None, Remat()], ids=["", "remat"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_each_chunk_computes_three_products(remat, tied):
    cfg = ax.select(tiny_model().set(vocab_size=333), Repeat).set(remat=remat)
    cfg = cfg.set(head=None) if tied else cfg
    made = program(cfg, Learner.Config(), Mesh(shape={"data": 1}).make(jax.devices()[:1]), CrossEntropy.Config(chunk=4))
    assert products(made.lower_train(tiny_batch()).compile().as_text(), 333) == 3


def test_evaluation_computes_one_product():
    cfg = tiny_model().set(vocab_size=333)
    made = program(cfg, Learner.Config(), Mesh(shape={"data": 1}).make(jax.devices()[:1]), CrossEntropy.Config(chunk=4))
    step = jax.jit(made.eval_step)
    text = step.lower(made.state.params, made.state.model_state, made.batch_shapes(tiny_batch())).compile().as_text()
    assert products(text, 333) == 1


class Counting(ax.Layer):
    """An adapter that is a function of the weight, which should run once per step."""

    def __call__(self, x, y, weight, product):
        return y + product(x, jnp.sin(weight))


def test_operations_on_parameters_run_before_the_loop():
    cfg = CausalLM.Config(
        vocab_size=VOCAB, dim=DIM, decoder=Sequence.Config(layers=()), head=Linear.Config(adapter=Counting.Config())
    )
    fn, params, _ = abstract(cfg)
    objective = CrossEntropy.Config(chunk=2).build()
    batch = {"inputs": TARGETS, "targets": TARGETS, "weights": WEIGHTS}
    jaxpr = jax.make_jaxpr(lambda params: objective.value(fn, params, {}, batch))(params)
    assert sum(eqn.primitive.name == "sin" for eqn in jaxpr.eqns) == 1
    assert str(jaxpr).count(" sin ") == 1


def loops(text):
    """The collectives in the loops of a compiled program whose bodies contain the vocabulary's products."""
    computations, name = {}, None
    for line in text.splitlines():
        if match := re.match(r"^(?:ENTRY )?(%[\w.-]+) .*\{$", line):
            name = match[1]
            computations[name] = []
        elif name:
            computations[name].append(line)
    bodies = set(re.findall(r"body=(%[\w.-]+)", text))
    kinds = r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return {
        body: [match[0] for line in computations[body] if (match := re.search(r"= \S+" + kinds, line))]
        for body in bodies
        if any("1000" in line and re.search(r" (dot|fusion|custom-call|call)\(", line) for line in computations[body])
    }


def compiled_on(meshes):
    """The compiled steps of a model with a vocabulary of 1000."""
    batch = jax.tree.map(np.asarray, tiny_batch(rows=8))
    found = []
    for mesh in meshes:
        made = program(tiny_model().set(vocab_size=1000), Learner.Config(), mesh.make(), CrossEntropy.Config(chunk=4))
        found.append(made.lower_train(batch).compile().as_text())
    return found


def test_no_loop_gathers_the_head_or_reduces_its_gradient():
    for text in on_devices(compiled_on, [Mesh(shape={"data": 2, "fsdp": 4}), Mesh(shape={"fsdp": 4, "context": 2})]):
        found = loops(text)
        assert found
        assert not any(found.values()), found


class Watching(ax.Layer):
    """An adapter that reports the number of its calls and its largest result."""

    def __call__(self, x, y, weight, product):
        self.add_summary("calls", jnp.float32(1), Reduce.SUM)
        self.add_summary("largest", y.max(), Reduce.MAX)
        return y


def watched_on(meshes):
    """The summaries of the head in a training step."""
    batch = jax.tree.map(np.asarray, tiny_batch(rows=8))
    cfg = tiny_model().set(head=Linear.Config(adapter=Watching.Config()))
    found = []
    for mesh in meshes:
        layout = mesh.make(jax.devices()[: math.prod(mesh.shape.values())])
        made = program(cfg, Learner.Config(), layout, CrossEntropy.Config(chunk=4))
        data = jax.device_put(batch, jax.tree.map(lambda leaf: leaf.sharding, made.batch_shapes(batch)))
        _, metrics = made.compile_train(batch)(made.init(jnp.uint32(0)), data)
        found.append([float(metrics[f"head.adapter.{name}"]) for name in ("calls", "largest")])
    return batch["inputs"].size, found


def test_summaries_are_reduced_over_chunks_and_devices():
    tokens, (one, many) = on_devices(watched_on, [Mesh(shape={"data": 1}), Mesh(shape={"data": 2, "fsdp": 4})])
    assert one[0] == many[0] == tokens / 4
    np.testing.assert_allclose(many[1], one[1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"data": 2, "fsdp": 2, "context": 2},
        {"fsdp": 4, "tensor": 2},
        {"pipeline": 2, "data": 2, "tensor": 2},
        {"pipeline": 2, "fsdp": 2, "context": 2},
    ],
    ids=str,
)
def test_eight_devices_agree_with_one(shape):
    batch = jax.tree.map(np.asarray, tiny_batch(rows=8))
    meshes = [Mesh(shape={"data": 1}), Mesh(shape=shape)]
    objective = CrossEntropy.Config(z_loss=1e-2, label_smoothing=0.1, chunk=5)
    one, many = steps(tiny_model().set(pad_vocab_to=8), batch, meshes, objective, [1, 2])
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-5)
    for path, update in one["updates"].items():
        atol = 1e-5 * np.abs(update).max()
        np.testing.assert_allclose(many["updates"][path], update, rtol=0, atol=atol, err_msg=path)
