"""A scanned stack, compared with separate calls of the same layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import ContextError, fold, functional, invoke, labelled, scan

from .layers import Parent, Plain, Stacked, Unrolled

COUNT, WIDTH = 3, 4
LAYER = Plain.Config(width=WIDTH, drop=True, summary=True, loss_weight=0.3, counts=True)
KEY = jax.random.key(7)
X = jnp.linspace(0.5, 2.0, 2 * WIDTH).reshape(2, WIDTH)


def run(cfg, params_of=lambda params: params):
    """(objective, gradients, output, collections, new state) of one training call, compiled as one program."""
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))

    def objective(params, state):
        (output, collections), state = fn(params, state, X, key=KEY, training=True)
        return output.sum() + collections.total_loss(), (output, collections, state)

    (value, (output, collections, state)), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(
        params_of(params), state
    )
    return jax.device_get((value, grads, output, collections, state))


def sliced(tree, count=COUNT):
    def layer(index):
        return jax.tree.map(lambda leaf: leaf[index], tree["layers"])

    return {"layers": {index: layer(index) for index in range(count)}}


@pytest.fixture(scope="module")
def stacked_params():
    return functional(Stacked.Config(layer=LAYER, count=COUNT).build(rngs=ax.Rngs(0)))[1]


@pytest.fixture(scope="module")
def by_hand(stacked_params):
    """The layers called in a Python loop, each with its slice of the stacked parameters."""
    return run(Unrolled.Config(layer=LAYER, count=COUNT), lambda _: sliced(stacked_params))


@pytest.fixture(
    scope="module",
    params=[{}, {"unroll": 2}, {"unroll": COUNT}, {"remat": True}, {"remat": True, "unroll": COUNT}],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()) or "plain",
)
def scanned(request):
    return run(Stacked.Config(layer=LAYER, count=COUNT, **request.param))


def test_values_and_gradients_equal_separate_calls_of_the_layers(scanned, by_hand):
    np.testing.assert_allclose(scanned[0], by_hand[0], rtol=1e-6)
    np.testing.assert_allclose(scanned[2], by_hand[2], rtol=1e-6)
    assert jax.tree.structure(sliced(scanned[1])) == jax.tree.structure(by_hand[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sliced(scanned[1]), by_hand[1])


def test_losses_and_summaries_are_labelled_by_layer(scanned, by_hand):
    def reported(collections):
        return {"mean": collections.summaries, "square": collections.weighted_losses()}

    for name, entries in reported(scanned[3]).items():
        expected = reported(by_hand[3])[name]
        assert list(entries) == [f"layers.*.{name}"]
        assert np.asarray(entries[f"layers.*.{name}"]).shape == (COUNT,)
        assert list(expected) == [f"layers.{index}.{name}" for index in range(COUNT)]
        spelled = labelled(entries)
        assert list(spelled) == list(expected)
        for path, value in expected.items():
            np.testing.assert_allclose(np.asarray(spelled[path]), np.asarray(value), rtol=1e-6, err_msg=path)


def test_mutable_variables_keep_the_values_that_each_layer_wrote(scanned, by_hand):
    counts = scanned[4]["layers"]["calls"]
    assert counts.shape == (COUNT,)
    assert counts.sum() > 0
    np.testing.assert_array_equal(counts, [by_hand[4]["layers"][index]["calls"] for index in range(COUNT)])


def test_values_and_losses_follow_the_formula_with_masks_drawn_by_hand(scanned, stacked_params):
    x = np.asarray(X, np.float64)
    scales = np.asarray(stacked_params["layers"]["scale"], np.float64)
    losses, means, counts = [], [], []
    for index in range(COUNT):
        here = fold(fold(KEY, "layers"), index)
        x = x * scales[index] * np.asarray(jax.random.bernoulli(fold(here, "dropout"), 0.5, x.shape))
        losses.append(0.3 * np.mean(x**2))
        means.append(np.mean(x))
        counts.append(np.sum(x > 0))
    np.testing.assert_allclose(scanned[2], x, rtol=1e-5)
    np.testing.assert_allclose(scanned[3].losses["layers.*.square"].mean(), losses, rtol=1e-5)
    np.testing.assert_allclose(scanned[3].summaries["layers.*.mean"], means, rtol=1e-5)
    np.testing.assert_array_equal(scanned[4]["layers"]["calls"], counts)
    np.testing.assert_allclose(scanned[0], x.sum() + np.sum(losses), rtol=1e-5)


def test_a_stack_of_stacks_equals_loops_in_loops():
    layer = Plain.Config(width=WIDTH, drop=True, summary=True, loss_weight=1.0)
    nested = run(Stacked.Config(layer=Stacked.Config(layer=layer, count=2), count=2))
    looped = run(Unrolled.Config(layer=Unrolled.Config(layer=layer, count=2), count=2))
    np.testing.assert_allclose(nested[0], looped[0], rtol=1e-5)
    assert list(nested[3].losses) == ["layers.*.layers.*.square"]
    spelled = labelled(nested[3].weighted_losses())
    assert list(spelled) == list(looped[3].losses)
    np.testing.assert_allclose(list(spelled.values()), list(looped[3].weighted_losses().values()), rtol=1e-5)


def test_a_call_of_the_module_changes_variables_in_place():
    model = Stacked.Config(layer=Plain.Config(width=WIDTH, counts=True), count=2).build(rngs=ax.Rngs(0))
    model(X)
    first = np.asarray(model.layers.calls[...])
    assert first.sum() > 0
    model(X)
    np.testing.assert_array_equal(model.layers.calls[...], 2 * first)


def test_a_scan_does_not_change_parameters(stacked_params):
    model = Stacked.Config(layer=LAYER, count=COUNT).build(rngs=ax.Rngs(0))
    invoke(model, X, key=KEY)
    np.testing.assert_array_equal(model.layers.scale[...], stacked_params["layers"]["scale"])


def test_a_draw_without_a_key_raises_and_names_the_stack():
    model = Stacked.Config(layer=Plain.Config(width=WIDTH, drop=True), count=2).build(rngs=ax.Rngs(0))
    with pytest.raises(ContextError, match=r"layers\.\* \(Plain\) drew from the PRNG stream 'dropout'"):
        model(X)


def test_scanning_a_stack_that_the_caller_does_not_contain_raises():
    stranger = Stacked.Config(layer=Plain.Config(width=WIDTH), count=2).build(rngs=ax.Rngs(0)).layers

    class Borrower(Parent):
        def __call__(self, x):
            return scan(stranger, x, count=2)

    model = Parent.Config(children=(("b", Borrower.Config()),)).build(rngs=ax.Rngs(0))
    with pytest.raises(ContextError, match=r"b \(Borrower\) scans a Plain that it does not contain"):
        invoke(model, "b", X)


class Miscounting(Stacked):
    def __call__(self, x):
        return scan(self.layers, x, count=self.config.count + 1)


class Widening(Plain):
    def __call__(self, x):
        return jnp.concatenate([x, x], axis=0)


@pytest.mark.parametrize(
    "cfg",
    [Miscounting.Config(layer=Plain.Config(width=WIDTH), count=2), Stacked.Config(layer=Widening.Config(width=WIDTH))],
    ids=["a count that is not the stack's", "a layer that changes the shape of the carry"],
)
def test_a_failing_scan_names_the_stack(cfg):
    model = Parent.Config(children=(("decoder", cfg),)).build(rngs=ax.Rngs(0))
    with pytest.raises(Exception) as error:
        invoke(model, "decoder", X)
    assert "decoder.layers" in "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


class Narrowing(Plain):
    def __call__(self, x):
        return x.astype(jnp.bfloat16)


def test_case_a_layer_that_returns_another_dtype_is_refused_with_both():
    cfg = Stacked.Config(layer=Narrowing.Config(width=WIDTH))
    model = Parent.Config(children=(("decoder", cfg),)).build(rngs=ax.Rngs(0))
    wanted = r"decoder\.layers: each layer of a stack must .* which is float32\[.*\], not bfloat16\[.*set equal dtypes"
    with pytest.raises(ax.ConfigError, match=wanted):
        invoke(model, "decoder", X)


def test_keeping_a_traced_value_inside_a_scan_raises():
    class Keeps(ax.Layer):
        def __call__(self, x):
            self.kept = x
            return x

    class Stack(ax.Layer):
        class Config(ax.Layer.Config):
            layers: Keeps.Config = Keeps.Config()

        def __init__(self, cfg, *, rngs):
            self.layers = ax.stack(lambda each: self.build_child(cfg.layers, each), rngs.at("layers"), 2)

        def __call__(self, x):
            return ax.scan(self.layers, x, count=2)

    with pytest.raises(ax.AxcoreError, match="kept"):
        ax.invoke(Stack.Config().build(rngs=ax.Rngs(0)), jnp.ones(3))
