"""A module as a pure function of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import ContextError, abstract, functional, initializer, invoke
from axcore.nn import Linear

from .layers import Parent, Plain, Stacked

WIDTH = 3
X = jnp.arange(1.0, 1.0 + WIDTH)
KEY = jax.random.key(5)


class Model(Parent):
    def __call__(self, x):
        return self.second(self.first(x))

    @ax.method
    def only_first(self, x, scale=1.0):
        return self.first(x) * scale


CFG = Model.Config(
    children=(
        ("first", Plain.Config(width=WIDTH, counts=True, loss_weight=1.0)),
        ("second", Plain.Config(width=WIDTH, drop=True, summary=True)),
    )
)


@pytest.fixture(scope="module")
def model():
    return CFG.build(rngs=ax.Rngs(0))


@pytest.fixture(scope="module")
def parts(model):
    return functional(model)


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def test_parameters_and_state_are_separate_nested_dicts(parts, model):
    _, params, state = parts
    assert params.keys() == {"first", "second"}
    assert params["first"].keys() == {"scale"}
    assert leaves(state).keys() == {"['first']['calls']"}
    assert type(params) is dict
    np.testing.assert_array_equal(params["first"]["scale"], model.first.scale[...])


def test_axes_have_the_structure_of_the_parameters(parts):
    fn, params, _ = parts
    assert fn.axes == {"first": {"scale": ("embed",)}, "second": {"scale": ("embed",)}}
    assert jax.tree.structure(fn.axes, is_leaf=lambda node: isinstance(node, tuple)) == jax.tree.structure(params)


@pytest.mark.parametrize("array", [np.arange(3.0), jnp.arange(3.0)], ids=["numpy", "jax"])
def test_an_array_in_a_plain_attribute_is_named(array):
    class Constant(ax.Layer):
        def __init__(self, cfg, *, rngs):
            self.table = array

    module = Model.Config(children=(("first", Constant.Config()),)).build(rngs=ax.Rngs(0))
    with pytest.raises(ContextError, match=r"^first \(Constant\) stores an array in its attribute 'table'\. Compute"):
        functional(module)


def test_a_functional_hashes_by_identity(parts):
    fn = parts[0]
    assert hash(fn) == hash(fn)
    assert {fn: 1}[fn] == 1


def test_a_compiled_call_equals_invoke(parts):
    fn, params, state = parts
    fresh = CFG.build(rngs=ax.Rngs(0))
    output, collections = invoke(fresh, X, key=KEY)
    call = jax.jit(lambda params, state, x, key: fn(params, state, x, key=key))
    (pure_output, pure_collections), new_state = call(params, state, X, KEY)
    np.testing.assert_allclose(pure_output, output, rtol=1e-6)
    assert leaves(pure_collections).keys() == leaves(collections).keys()
    for name, value in leaves(collections).items():
        np.testing.assert_allclose(leaves(pure_collections)[name], value, rtol=1e-6)
    np.testing.assert_array_equal(new_state["first"]["calls"], fresh.first.calls[...])


def test_a_call_changes_neither_the_module_nor_its_arguments(parts, model):
    fn, params, state = parts
    before = int(state["first"]["calls"])
    _, new_state = fn(params, state, X, key=KEY)
    assert int(new_state["first"]["calls"]) > before
    assert int(state["first"]["calls"]) == before
    assert int(model.first.calls[...]) == before


def test_a_named_method_gets_its_arguments(parts, model):
    fn, params, state = parts
    (output, _), _ = fn(params, state, X, scale=2.0, method="only_first")
    np.testing.assert_allclose(output, 2.0 * np.asarray(X) * np.asarray(model.first.scale[...]), rtol=1e-6)


def test_gradients_equal_the_formula(parts):
    fn, params, state = parts

    def objective(params):
        (output, collections), _ = fn(params, state, X, method="only_first")
        return output.sum() + collections.total_loss()

    grads = jax.jit(jax.grad(objective))(params)
    x, scale = np.asarray(X, np.float64), np.asarray(params["first"]["scale"], np.float64)
    np.testing.assert_allclose(grads["first"]["scale"], x + 2 * x**2 * scale / WIDTH, rtol=1e-5)
    np.testing.assert_array_equal(grads["second"]["scale"], np.zeros(WIDTH))


def test_vmap_over_inputs_equals_separate_calls(parts):
    fn, params, state = parts
    xs = jnp.stack([X, 2 * X])

    def call(x):
        return fn(params, state, x, method="only_first")

    (outputs, collections), states = jax.jit(jax.vmap(call))(xs)
    for index in range(2):
        (output, one), one_state = call(xs[index])
        np.testing.assert_allclose(outputs[index], output, rtol=1e-6)
        found, expected = (each.losses["first.square"].mean() for each in (collections, one))
        np.testing.assert_allclose(found[index], expected, rtol=1e-6)
        np.testing.assert_array_equal(states["first"]["calls"][index], one_state["first"]["calls"])


def test_vmap_over_parameters_runs_an_ensemble(parts):
    fn, params, state = parts
    ensemble = jax.tree.map(lambda leaf: jnp.stack([leaf, 3 * leaf]), params)
    (outputs, _), _ = jax.vmap(lambda params: fn(params, state, X, method="only_first"))(ensemble)
    np.testing.assert_allclose(outputs[1], 3 * np.asarray(outputs[0]), rtol=1e-6)


STACKED = Model.Config(
    children=(
        ("first", Stacked.Config(layer=Plain.Config(width=WIDTH, counts=True), count=2)),
        ("second", Linear.Config(input_dim=WIDTH, output_dim=2, use_bias=True)),
    ),
    dtypes=ax.DTypes(param="bfloat16"),
)


@pytest.mark.parametrize("cfg", [CFG, STACKED], ids=["plain", "stacked"])
def test_abstract_has_the_shapes_dtypes_and_axes_of_functional(cfg):
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    abstract_fn, abstract_params, abstract_state = abstract(cfg)
    assert abstract_fn.axes == fn.axes
    for real, shapes in ((params, abstract_params), (state, abstract_state)):
        assert leaves(shapes).keys() == leaves(real).keys()
        for path, shape in leaves(shapes).items():
            assert isinstance(shape, jax.ShapeDtypeStruct)
            assert (shape.shape, shape.dtype) == (leaves(real)[path].shape, leaves(real)[path].dtype), path


def test_an_abstract_function_runs_on_real_arrays(parts):
    fn, params, state = parts
    (expected, _), _ = fn(params, state, X, method="only_first")
    (output, _), _ = abstract(CFG)[0](params, state, X, method="only_first")
    np.testing.assert_array_equal(output, expected)


def test_abstract_allocates_no_arrays():
    fn, params, state = abstract(Linear.Config(input_dim=2**21, output_dim=2**21))  # 16 TiB
    assert params["weight"].shape == (2**21, 2**21)
    assert fn.axes == {"weight": (None, None)}
    assert state == {}


@pytest.mark.parametrize("cfg", [CFG, STACKED], ids=["plain", "stacked"])
def test_a_compiled_initializer_equals_an_eager_build(cfg):
    _, params, state = functional(cfg.build(rngs=ax.Rngs(3)))
    made_params, made_state = jax.jit(initializer(cfg))(jax.random.key(3))
    for real, made in ((params, made_params), (state, made_state)):
        assert leaves(made).keys() == leaves(real).keys()
        for path, leaf in leaves(made).items():
            assert leaf.dtype == leaves(real)[path].dtype
            np.testing.assert_allclose(
                np.asarray(leaf, np.float32), np.asarray(leaves(real)[path], np.float32), rtol=2e-6, err_msg=path
            )


def test_calling_a_functional_twice_traces_it_once(parts):
    fn, params, state = parts
    traces = []

    @jax.jit
    def call(params, state, x):
        traces.append(1)
        return fn(params, state, x, method="only_first")

    _, new_state = call(params, state, X)
    call(params, new_state, X)
    assert len(traces) == 1
