"""Functions, classes and stock `nnx.Module`s as nodes; axcore layers inside plain NNX models."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axcore as ax
from axcore.config import REQUIRED, ConfigError, MissingError, from_json, override, text, to_json
from axcore.module import BuildError, abstract, functional, invoke
from axcore.nn import FeedForward, Linear, Repeat, TransformerLayer
from axcore.nn.third_party import Call, Stock

WIDTHS = {"in_features": "input_dim", "out_features": "output_dim"}


def scaled(base, *, by: float = 2.0, times: int = 1, loud: bool = False):
    return base * by * times


class Holder(ax.Config):
    transform: Call = REQUIRED


# Functions.


def test_the_function_is_called_at_build():
    update = ax.call(optax.scale_by_adam, b2=0.95).build().update
    params = {"w": jnp.ones(3)}
    wanted = optax.scale_by_adam(b2=0.95)
    state = wanted.init(params)
    for ours, theirs in zip(update(params, state)[0].values(), wanted.update(params, state)[0].values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_arguments_of_build_are_passed_unchanged():
    assert ax.call(scaled, by=3.0).build(2) == 6.0
    assert ax.call(scaled, by=3.0).build(base=2) == 6.0
    assert ax.call(scaled, base=2).build(times=5) == 20.0


def test_arguments_that_are_nodes_are_built_first():
    cfg = ax.call(optax.scale_by_schedule, step_size_fn=ax.call(optax.constant_schedule, value=0.25))
    transform = cfg.build()
    updates, _ = transform.update(jnp.ones(()), transform.init(jnp.ones(())))
    assert updates == 0.25
    assert ax.call(scaled, base=ax.call(scaled, base=1.0)).build() == 4.0


def test_omitted_arguments_are_required():
    cfg = ax.call(scaled)
    assert cfg.arguments == {"base": REQUIRED}
    with pytest.raises(MissingError, match=r"arguments.base is REQUIRED \(.*scaled\)"):
        cfg.build()
    assert override(cfg, ["arguments.base=4"]).build() == 8
    assert ax.call(optax.adam).arguments == {"learning_rate": REQUIRED}


@pytest.mark.parametrize("name", ["bye", "b_y"])
def test_an_unknown_argument_raises_and_suggests_the_nearest(name):
    with pytest.raises(ConfigError, match=rf"scaled takes no argument '{name}'. Did you mean 'by'\?"):
        ax.call(scaled, **{name: 1.0})
    with pytest.raises(ConfigError, match="Did you mean 'by'"):
        override(ax.call(scaled), [f"arguments.{name}=1.0"])


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("by=0.5", 0.5),
        ("by=3", 3.0),
        ("by=1e-3", 1e-3),
        ("times=4", 4),
        ("loud=true", True),
        ("loud=False", False),
        ("base=word", "word"),
        ("base=(1, 2)", (1, 2)),
    ],
)
def test_an_override_is_typed_by_the_signature(assignment, expected):
    cfg = override(Holder(transform=ax.call(scaled)), [f"transform.arguments.{assignment}"])
    value = cfg.transform.arguments[assignment.partition("=")[0]]
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize("assignment", ["by=fast", "times=0.5", "times=many", "loud=perhaps", "loud=3"])
def test_an_override_of_another_type_raises(assignment):
    name = assignment.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{name} must be (float|int|bool), not"):
        override(Holder(transform=ax.call(scaled)), [f"transform.arguments.{assignment}"])


def test_optax_arguments_are_typed_too():
    cfg = override(
        ax.call(optax.adamw), ["arguments.learning_rate=1e-3", "arguments.b2=0.9", "arguments.nesterov=true"]
    )
    assert cfg.arguments == {"learning_rate": 1e-3, "b2": 0.9, "nesterov": True}
    for wrong in ("b2=high", "nesterov=5", "learning_rate=fast"):
        with pytest.raises(ConfigError, match="must be"):
            override(cfg, [f"arguments.{wrong}"])
    assert override(ax.call(optax.scale_by_adam), ["arguments.mu_dtype=bfloat16"]).build()


def test_functions_without_a_signature_accept_all_arguments():
    assert ax.call(dict, anything=1).build() == {"anything": 1}
    assert ax.call(max).build(1, 2) == 2


@pytest.mark.parametrize(
    "what", [3, None, "optax.adam", functools.partial(scaled, by=3.0)], ids=lambda value: type(value).__name__
)
def test_functions_without_an_importable_name_raise(what):
    with pytest.raises(ConfigError, match="cannot be imported by its name"):
        ax.call(what)


def test_a_call_round_trips_through_json_and_pickle_and_appears_in_text():
    cfg = ax.call(optax.adamw, learning_rate=ax.call(optax.constant_schedule, value=0.1), mu_dtype=jnp.bfloat16)
    again = from_json(to_json(cfg))
    assert again == cfg and text(again) == text(cfg)
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert "function: optax._src.alias.adamw\n" in text(cfg)
    assert 'arguments.learning_rate.arguments: {"value": 0.1}\n' in text(cfg)


# Stock modules in a slot.


class Model(ax.Layer):
    class Config(ax.Layer.Config):
        part: ax.Layer.Config = REQUIRED
        width: int = 4

    def __init__(self, cfg, *, rngs):
        self.part = self.child("part", cfg.part, rngs, input_dim=cfg.width, output_dim=3)

    def __call__(self, x):
        return self.part(x)


def built(part, seed=0):
    return functional(Model.Config(part=part).build(rngs=ax.Rngs(seed)))


def test_a_stock_linear_receives_the_widths_of_its_parent():
    fn, params, state = built(ax.stock(nnx.Linear, widths=WIDTHS))
    kernel, bias = params["part"]["module"]["kernel"], params["part"]["module"]["bias"]
    assert kernel.shape == (4, 3) and bias.shape == (3,)
    x = jnp.arange(8.0).reshape(2, 4)
    (y, _), _ = fn(params, state, x)
    np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(kernel) + np.asarray(bias), rtol=1e-6)


def test_the_parameters_of_each_slot_depend_on_its_path():
    kernel = lambda part, seed=0: np.asarray(built(part, seed)[1]["part"]["module"]["kernel"])  # noqa: E731
    cfg = ax.stock(nnx.Linear, widths=WIDTHS)
    np.testing.assert_array_equal(kernel(cfg), kernel(cfg))
    assert not np.array_equal(kernel(cfg), kernel(cfg, seed=1))


def test_arguments_that_are_nodes_are_built_before_the_module():
    normal = ax.call(nnx.initializers.constant, value=2.0)
    params = built(ax.stock(nnx.Linear, widths=WIDTHS, kernel_init=normal))[1]
    assert np.all(np.asarray(params["part"]["module"]["kernel"]) == 2.0)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: ax.stock(nnx.Linear, in_feature=3), "takes no argument 'in_feature'. Did you mean 'in_features'"),
        (lambda: ax.stock(nnx.Linear, widths={"in_feature": "input_dim"}), "Did you mean 'in_features'"),
        (
            lambda: ax.stock(nnx.Linear, widths={"in_features": "input_dm"}),
            "'input_dm' is not a width that a parent passes. Did you mean",
        ),
        (lambda: ax.stock(nnx.Linear, widths=WIDTHS, in_features=3), "the parent sets in_features"),
        (lambda: ax.stock(nnx.Linear, widths=WIDTHS, use_bias="maybe"), "use_bias must be bool, not 'maybe'"),
        (lambda: ax.stock(3), "cannot be imported by its name"),
    ],
)
def test_invalid_arguments_raise_immediately(make, expected):
    with pytest.raises(ConfigError) as error:
        make()
    assert expected in str(error.value)


def test_an_argument_is_overridden_by_its_path():
    cfg = Model.Config(part=ax.stock(nnx.Linear, widths=WIDTHS))
    cfg = override(cfg, ["part.arguments.use_bias=false"])
    assert set(abstract(cfg)[1]["part"]["module"]) == {"kernel"}
    with pytest.raises(ConfigError, match="Did you mean 'use_bias'"):
        override(cfg, ["part.arguments.use_bais=false"])


def test_missing_values_raise_at_build_with_the_path():
    with pytest.raises(BuildError, match=r"^part: .*Linear: out_features is REQUIRED"):
        built(ax.stock(nnx.Linear, widths={"in_features": "input_dim"}))
    with pytest.raises(BuildError, match=r"^part: .*in_features requires hidden_dim, which the parent does not pass"):
        built(ax.stock(nnx.Linear, widths={"in_features": "hidden_dim"}, out_features=3))
    with pytest.raises(BuildError, match=r"^the root: "):
        ax.stock(nnx.Linear, in_features=3).build(rngs=ax.Rngs(0))


def test_a_stock_config_round_trips_through_json():
    cfg = Model.Config(
        part=ax.stock(
            nnx.Linear,
            widths=WIDTHS,
            param_dtype=jnp.bfloat16,
            kernel_init=nnx.initializers.normal(0.5),
            use_bias=False,
        )
    )
    again = from_json(to_json(cfg))
    assert again == cfg and text(again) == text(cfg)
    kernel = abstract(again)[1]["part"]["module"]["kernel"]
    assert (kernel.shape, kernel.dtype) == ((4, 3), jnp.bfloat16)


def test_each_call_of_stock_dropout_draws_new_bits_and_updates_its_state():
    fn, params, state = built(ax.stock(nnx.Dropout, rate=0.5))
    call = jax.jit(lambda state: fn(params, state, jnp.ones((4, 64)), training=True))
    (one, _), after = call(state)
    (two, _), _ = call(after)
    (same, _), _ = call(state)
    assert set(np.unique(one)) == {0.0, 2.0} and 0.3 < np.mean(one == 0) < 0.7
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, two)


@pytest.mark.parametrize(("fixed", "dropped"), [({}, (False, True)), ({"deterministic": False}, (True, True))])
def test_case_8_stock_dropout_follows_the_mode_of_the_call_unless_an_argument_fixes_it(fixed, dropped):
    layer = ax.stock(nnx.Dropout, rate=0.5, **fixed).build(rngs=ax.Rngs(0))
    found = tuple(bool(np.any(invoke(layer, jnp.ones(64), training=on)[0] == 0)) for on in (False, True))
    assert found == dropped


NORM = ax.stock(nnx.BatchNorm, widths={"num_features": "input_dim"}, momentum=0.5)


def test_stock_batch_norm_updates_its_statistics():
    fn, params, state = built(NORM)
    x = jnp.asarray(np.random.default_rng(0).normal(3.0, 2.0, (64, 4)), jnp.float32)
    (y, _), after = jax.jit(lambda state: fn(params, state, x, training=True))(state)
    np.testing.assert_allclose(np.mean(y, 0), 0, atol=1e-5)
    np.testing.assert_allclose(after["part"]["module"]["mean"], 0.5 * np.mean(x, 0), rtol=1e-5)
    np.testing.assert_allclose(after["part"]["module"]["var"], 0.5 + 0.5 * np.var(x, 0), rtol=1e-4)
    assert set(params["part"]["module"]) == {"scale", "bias"}


def test_stock_modules_in_a_scanned_stack_keep_a_state_for_each_layer():
    cfg = Repeat.Config(input_dim=4, num_layers=3, layers=NORM)
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    assert state["layers"]["module"]["mean"].shape == (3, 4)
    x = jnp.asarray(np.random.default_rng(0).normal(3.0, 2.0, (64, 4)), jnp.float32)
    (y, _), after = jax.jit(lambda state: fn(params, state, x, training=True))(state)
    mean = np.asarray(after["layers"]["module"]["mean"])
    np.testing.assert_allclose(mean[0], 0.5 * np.mean(x, 0), rtol=1e-5)
    np.testing.assert_allclose(mean[1:], 0, atol=1e-5)  # the normalized input of the first layer
    np.testing.assert_allclose(np.std(y, 0), 1, rtol=1e-3)


def test_stock_dropout_in_a_scanned_stack_differs_between_layers():
    layer = ax.stock(nnx.Dropout, rate=0.5)
    fn, params, state = functional(Repeat.Config(input_dim=4, num_layers=2, layers=layer).build(rngs=ax.Rngs(0)))
    (y, _), _ = jax.jit(lambda state: fn(params, state, jnp.ones((8, 64)), training=True))(state)
    assert 0.6 < np.mean(np.asarray(y) == 0) < 0.9  # 3/4 if the layers draw different bits, 1/2 if they do not


def test_a_stock_module_in_the_slot_of_a_transformer_layer_is_trained():
    layer = TransformerLayer.Config(attention_norm=NORM, ffn_norm=NORM)
    layer = layer.set(attention=layer.attention.set(num_heads=2), ffn=FeedForward.Config(hidden_dim=8))
    _, params, state = abstract(Repeat.Config(input_dim=4, num_layers=2, layers=layer))
    assert params["layers"]["ffn_norm"]["module"]["scale"].shape == (2, 4)
    assert state["layers"]["ffn_norm"]["module"]["mean"].shape == (2, 4)


# axcore layers in NNX models.


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = FeedForward.Config(input_dim=8, hidden_dim=16).build(rngs=ax.Rngs(rngs.params()))
        self.third = Linear.Config(input_dim=8, output_dim=1).build(rngs=ax.Rngs(rngs.params()))

    def __call__(self, x):
        h = self.first(x)
        h, _ = invoke(self.second, h)
        return invoke(self.third, h)[0]


def test_an_axcore_layer_trains_inside_a_plain_nnx_model():
    model = Plain(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 4)), jnp.float32)
    target = x[:, :1] * 2 - 1

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - target) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    before = np.asarray(model.second.gate.weight[...])
    losses = [float(step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]
    assert not np.array_equal(before, model.second.gate.weight[...])


def test_an_axcore_layer_supports_nnx_split_and_merge():
    model = Plain(nnx.Rngs(0))
    x = jnp.ones((2, 4))
    graphdef, state = nnx.split(model)
    np.testing.assert_array_equal(nnx.merge(graphdef, state)(x), model(x))
    zeros = jax.tree.map(jnp.zeros_like, state)
    assert np.all(np.asarray(nnx.merge(graphdef, zeros)(x)) == 0)
    copy = nnx.clone(model)
    assert copy.second.config == model.second.config
    np.testing.assert_array_equal(jax.jit(lambda state: nnx.merge(graphdef, state)(x))(state), model(x))


def test_reports_of_a_stock_layer_have_its_path():
    assert isinstance(ax.stock(nnx.Linear, widths=WIDTHS), Stock.Config)


def test_case_a_required_argument_that_nobody_gives_is_named():
    norm = ax.stock(nnx.LayerNorm, widths={"num_features": "input_dim"})
    with pytest.raises(
        ConfigError, match=r"LayerNorm requires num_features\. Add it to the arguments, or to the widths"
    ):
        norm.set(widths={})


def test_case_dtypes_of_a_stock_module_are_refused_since_its_arguments_set_them():
    norm = ax.stock(nnx.LayerNorm, widths={"num_features": "input_dim"}).set(dtypes=ax.DTypes(param="bfloat16"))
    layer = TransformerLayer.Config(input_dim=8, ffn_norm=norm, ffn=FeedForward.Config(hidden_dim=8))
    layer = ax.select(layer, "attention").set(num_heads=2)
    with pytest.raises(BuildError, match=r"^ffn_norm: dtypes=DTypes\(param=.*\) has no effect on Stock"):
        abstract(layer)
