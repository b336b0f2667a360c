"""Chunked cross-entropy: equal results without an array of all logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import axcore as ax
from axcore.module import ContextError, GradientState, LossSum, Reduce, overwrite_with_gradient, to_fm32
from axcore.nn import CausalLM, Linear, Sequence
from axcore.parallel import Remat
from axcore.testing import tiny_batch, tiny_model
from axcore.train import CrossEntropy

from . import reference
from .support import minimized, parameters, shapes, wide

pytestmark = pytest.mark.long

VOCAB, DIM, ROWS, SEQ = 11, 4, 2, 7
RANDOM = np.random.default_rng(0)
BATCH = {
    "inputs": RANDOM.integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32),
    "targets": RANDOM.integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32),
    "weights": (RANDOM.random((ROWS, SEQ)) * (RANDOM.random((ROWS, SEQ)) < 0.7)).astype(np.float32),
}


def model(**options):
    """A model that consists of embeddings only."""
    return CausalLM.Config(**{"vocab_size": VOCAB, "dim": DIM, "decoder": Sequence.Config(layers=())} | options)


def run(cfg, params, batch=BATCH, **fields):
    """The loss, the added losses, and the gradients of their sum."""
    fn, objective = shapes(cfg)[0], CrossEntropy.Config(**fields).build()

    def minimized(params):
        (loss, collections), _ = fn(params, {}, batch, method=objective)
        return loss.mean() + collections.total_loss(), (loss.mean(), collections.weighted_losses())

    (_, reported), grads = jax.jit(jax.value_and_grad(minimized, has_aux=True))(params)
    return jax.device_get((reported, grads))


@pytest.mark.parametrize("chunk", [1, 2, 3, 6, 7, 100], ids="chunks of {}".format)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_chunks_do_not_change_loss_and_gradients(chunk, tied):
    options = {"head": None} if tied else {"head": Linear.Config(use_bias=True)}
    cfg, fields = model(softcap=5.0, **options), {"z_loss": 0.1, "label_smoothing": 0.1}
    params = parameters(cfg)
    (loss, added), grads = run(cfg, params, **fields)
    (chunked, chunked_added), chunked_grads = run(cfg, params, chunk=chunk, **fields)
    np.testing.assert_allclose(chunked, loss, rtol=1e-6)
    assert chunked_added.keys() == added.keys() == {"z_loss", "label_smoothing"}
    for name, value in added.items():
        np.testing.assert_allclose(chunked_added[name], value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), chunked_grads, grads)


def test_the_loss_in_chunks_follows_the_formula():
    cfg = model()
    params = parameters(cfg)
    p = wide(params)
    logits = reference.rms_norm(p["embedding"]["weight"][BATCH["inputs"]], p["norm"]["scale"]) @ p["head"]["weight"]
    (loss, added), _ = run(cfg, params, z_loss=0.1, chunk=3)
    expected, z_loss = reference.objective(logits, BATCH["targets"], BATCH["weights"], 0.1)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(added["z_loss"], z_loss, rtol=1e-5)


@pytest.mark.parametrize("ignored", [-1, -100, VOCAB, 10**6])
def test_a_target_of_weight_zero_may_be_any_number_in_chunks(ignored):
    cfg = model()
    params = parameters(cfg)
    targets = np.where(BATCH["weights"] > 0, BATCH["targets"], ignored).astype(np.int32)
    fields = {"z_loss": 0.1, "chunk": 3}
    expected, found = run(cfg, params, **fields), run(cfg, params, {**BATCH, "targets": targets}, **fields)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected)


@pytest.mark.slow
def test_gradients_in_bfloat16_with_remat_are_close_to_float32():
    cfg = ax.select(tiny_model(), "decoder").set(remat=Remat()).set(dtypes=ax.DTypes(compute="bfloat16"))
    params = parameters(cfg, scale=0.2)
    (loss, _), grads = run(cfg, params, tiny_batch())
    (chunked, _), chunked_grads = run(cfg, params, tiny_batch(), chunk=3)
    np.testing.assert_allclose(chunked, loss, rtol=1e-5)
    for path, gradient in jax.tree.leaves_with_path(grads):
        found = chunked_grads
        for key in path:
            found = found[key.key]
        atol = 2e-2 * np.abs(gradient).max()  # sums over pieces round differently
        np.testing.assert_allclose(found, gradient, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def sizes(jaxpr):
    """The number of elements of every array in a jaxpr, including nested ones."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield int(np.prod(variable.aval.shape))
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


WIDE = model(vocab_size=1024, dim=16)
"""A model whose logits are far larger than any other array: 8 rows of 64 tokens, dim 16, a vocabulary of 1024."""


ROWS_OF_MANY = {"inputs": np.zeros((8, 64), np.int32), "targets": np.ones((8, 64), np.int32)}
MANY = {**ROWS_OF_MANY, "weights": np.ones((8, 64), np.float32)}


def learning(cfg, chunk):
    value = minimized(cfg, z_loss=0.1, chunk=chunk)
    return jax.grad(lambda params: value(params, MANY)), shapes(cfg)[1]


@pytest.mark.parametrize("head", [{}, {"head": None}], ids=["head", "tied"])
def test_no_array_contains_all_logits(head):
    def largest(chunk):
        step, params = learning(WIDE.set(**head), chunk)
        return max(sizes(jax.make_jaxpr(step)(params).jaxpr))

    assert largest(None) >= 8 * 64 * 1024
    assert largest(8) <= 8 * 8 * 1024


def test_the_compiled_step_needs_a_fraction_of_the_memory():
    def temporaries(chunk):
        step, params = learning(WIDE, chunk)
        return jax.jit(step).lower(params).compile().memory_analysis().temp_size_in_bytes

    whole, eighth = temporaries(None), temporaries(8)
    assert whole > 4 * 8 * 64 * 1024
    assert eighth < whole / 4


class Noisy(ax.Layer):
    """An adapter that adds random noise to each input, like dropout."""

    def __call__(self, x, y, weight, product):
        return y + jax.random.normal(self.rng("noise"), y.shape)


def test_each_piece_draws_different_bits():
    cfg = model(head=Linear.Config(adapter=Noisy.Config()))
    params = jax.tree.map(jnp.zeros_like, parameters(cfg))  # all logits are random
    batch = {"inputs": np.zeros((1, 8), np.int32), "targets": np.zeros((1, 8), np.int32)}
    fn, objective = shapes(cfg)[0], CrossEntropy.Config(chunk=2).build()
    batch = {**batch, "weights": np.ones((1, 8), np.float32)}

    def of_each(weights):
        return fn(params, {}, {**batch, "weights": weights}, key=jax.random.key(0), method=objective)[0][0].total

    losses = jax.vmap(of_each)(np.eye(8, dtype=np.float32)[:, None])
    assert len(np.unique(np.asarray(losses))) == 8


@jax.custom_vjp
def observed(y, largest):
    return y


observed.defvjp(lambda y, largest: (y, y), lambda y, gradient: (gradient, jnp.abs(y).max()))


class Watching(ax.Layer):
    """An adapter whose state becomes the largest absolute output."""

    def __init__(self, cfg, *, rngs):
        self.largest = GradientState(jnp.zeros((), jnp.float32))

    def __call__(self, x, y, weight, product):
        return observed(y, self.largest[...])


def test_gradient_state_is_the_maximum_over_all_pieces():
    cfg = model(head=Linear.Config(adapter=Watching.Config()))
    fn, _, state = shapes(cfg)
    state, params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state), parameters(cfg)

    def new_state(chunk):
        objective = CrossEntropy.Config(chunk=chunk).build()
        gradient = jax.grad(lambda state: objective.value(fn, params, state, BATCH), allow_int=True)
        return jax.jit(lambda state: overwrite_with_gradient(gradient(to_fm32(state)), state))(state)

    whole, pieces = (new_state(chunk)["head"]["adapter"]["largest"] for chunk in (None, 2))
    assert whole > 0
    np.testing.assert_allclose(pieces, whole, rtol=1e-6)


def reporting(what):
    class Reporting(ax.Layer):
        def __call__(self, x, y, weight, product):
            what(self, y)
            return y

    return model(head=Linear.Config(adapter=Reporting.Config()))


@pytest.mark.parametrize(
    ("rule", "value", "expected"),
    [
        ("sum", lambda y: jnp.ones(()), 4.0),
        ("max", lambda y: y.max(), None),
        ("min", lambda y: y.min(), None),
        ("mean", lambda y: jnp.float32(3.0), 3.0),
    ],
)
def test_summaries_are_reduced_over_the_chunks_by_their_rule(rule, value, expected):
    """With and without gradients, in four chunks."""
    cfg = reporting(lambda layer, y: layer.add_summary("watched", value(y), Reduce(rule)))
    fn, params = shapes(cfg)[0], parameters(cfg)

    def watched(params, chunk):
        (loss, collections), _ = fn(params, {}, BATCH, method=CrossEntropy.Config(chunk=chunk).build())
        return loss.mean(), collections.summaries["head.adapter.watched"].value

    if expected is None:
        expected = watched(params, None)[1]
    np.testing.assert_allclose(watched(params, 4)[1], expected, rtol=1e-6)
    (_, found), gradients = jax.value_and_grad(watched, has_aux=True)(params, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    plain = jax.grad(watched, has_aux=True)(params, None)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), gradients, plain)


def test_a_loss_inside_a_chunk_raises():
    cfg = reporting(lambda layer, y: layer.add_loss("size", jnp.sum(y * y), 1))
    with pytest.raises(
        ContextError, match=r"the body of chunked_sum reports head.adapter.size.*set chunk=None, .*return the values"
    ):
        run(cfg, parameters(cfg), chunk=2)


@pytest.mark.parametrize("weight", [0.0, 1e-42])
def test_gradients_of_a_prediction_of_weight_zero_are_zero(weight):
    """1e-42 is subnormal, which devices flush to 0."""

    class Weightless(CrossEntropy):
        def __call__(self, model, batch):
            (main,) = model.predictions(batch)
            main = dataclasses.replace(main, loss_weight=weight)
            return LossSum(weight * self._sums(model, main, {})["loss"], main.weights.sum())

    cfg = model()
    fn, objective = shapes(cfg)[0], Weightless.Config(chunk=3).build()
    gradients = jax.grad(lambda params: fn(params, {}, BATCH, method=objective)[0][0].mean())(parameters(cfg))
    jax.tree.map(lambda g: np.testing.assert_allclose(g, 0, atol=1e-40), gradients)
