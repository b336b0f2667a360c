"""The debugging flags of JAX reach the steps of a run."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import scan, stack
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.parallel import Mesh
from axcore.train import Learner, TrainingError
from axcore.train.step.nan import origin
from axcore.train.step.program import program

IDS = np.arange(6, dtype=np.int32).reshape(1, 6)
BATCH = {"inputs": IDS, "targets": (IDS + 1) % 7, "weights": np.ones((1, 6), np.float32)}


def made(activation):
    """The program of a small model with this activation, and its first state."""
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=6, activation=activation)
    )
    model = CausalLM.Config(vocab_size=7, dim=4, decoder=Repeat.Config(num_layers=2, layers=layer), head=None)
    found = program(model, Learner.Config(), Mesh().make())
    return found, found.init(np.uint32(0))


class Log(ax.Layer):
    """The logarithm of a linear function, or the identity with a NaN as its gradient."""

    class Config(ax.Layer.Config):
        backward: bool = False

    def __init__(self, cfg, *, rngs):
        self.scale = self.param("scale", (), lambda key, shape, dtype: jnp.ones(shape, dtype), rngs, axes=())

    def __call__(self, x):
        y = self.scale[...] * x
        return _without_gradient(y) if self.config.backward else jnp.log(y)


@jax.custom_vjp
def _without_gradient(x):
    return x


_without_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (jnp.log(-jnp.abs(gradient) - 1),))


class Model(ax.Layer):
    """`Log` in a scan of three layers."""

    class Config(ax.Layer.Config):
        log: Log.Config = Log.Config()

    def __init__(self, cfg, *, rngs):
        self.layers = stack(lambda rngs: self.build_child(cfg.log, rngs), rngs.at("layers"), 3)

    def __call__(self, x):
        return scan(self.layers, x, count=3)


@pytest.mark.parametrize(
    ("start", "backward", "where"),
    [
        (0.5, False, "layers.1, in the operation log of the forward pass"),  # log(log(0.5)) is a NaN
        (2.0, False, "layers.2, in the operation log of the forward pass"),
        (0.5, True, "layers.2, in the operation log of the backward pass"),  # the first layer of the backward pass
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_case_9_a_nan_is_traced_to_the_layer_of_a_scan(start, backward, where, compiled):
    fn, params, state = ax.functional(Model.Config(log=Log.Config(backward=backward)).build(rngs=ax.Rngs(0)))
    step = jax.value_and_grad(lambda params, x: fn(params, state, x)[0][0])
    found = origin(jax.jit(step) if compiled else step, params, jnp.float32(start))
    assert found == f"a NaN first arises in {where}"


def test_case_9_the_index_of_a_layer_is_not_that_of_a_microbatch():
    fn, params, state = ax.functional(Model.Config().build(rngs=ax.Rngs(0)))
    found = origin(lambda xs: jax.lax.map(lambda x: fn(params, state, x)[0][0], xs), jnp.array([2.0, 17.0]))
    assert found == "a NaN first arises in layers.2, in the operation log of the forward pass"


def test_case_9_a_nan_among_the_arguments_is_not_blamed_on_a_layer():
    assert origin(jnp.log, jnp.float32(np.nan)) == "an argument contains a NaN"
    found = origin(jnp.log, jnp.float32(-1))
    assert found == "a NaN first arises in code outside of the layers, in the operation log of the forward pass"


def _negative_log(x):
    return jnp.log(-jnp.abs(x) - 1)


@pytest.mark.long
def test_case_9_debug_nans_names_the_layer_of_the_training_step():
    with jax.debug_nans(True):
        found, state = made(_negative_log)
        train, evaluate = found.compile_train(BATCH), found.compile_eval(BATCH)
        with pytest.raises(TrainingError, match=r"^jax_debug_nans: a NaN first arises in decoder\.layers\.0\.ffn, in "):
            train(state, BATCH)
        with pytest.raises(TrainingError, match=r"decoder\.layers\.0\.ffn"):
            evaluate(state.params, state.model_state, BATCH)


@pytest.mark.long
def test_case_9_disable_jit_runs_the_steps_without_compiling_them():
    traced = []

    def activation(x):
        traced.append(isinstance(x, jax.core.Tracer))
        return jax.nn.silu(x)

    found, state = made(activation)
    expected = found.compile_eval(BATCH)(state.params, state.model_state, BATCH)
    traced.clear()
    with jax.disable_jit():
        assert found.compile_train(BATCH) == found.train_step
        total = found.compile_eval(BATCH)(state.params, state.model_state, BATCH)
    assert traced == [False, False]  # once for each layer
    np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_case_9_check_tracer_leaks_accepts_the_training_step():
    with jax.checking_leaks():
        found, state = made(jax.nn.silu)
        _, metrics = found.compile_train(BATCH)(state, BATCH)
    assert np.isfinite(metrics["loss"])


def test_case_9_check_tracer_leaks_finds_a_leak_in_a_layer(monkeypatch):
    referrers = gc.get_referrers

    def of_traces(
        value,
    ):  # for its message, JAX also searches memory for what refers to the tracer, which takes minutes
        return [] if isinstance(value, jax.core.Tracer) else referrers(value)

    monkeypatch.setattr(gc, "get_referrers", of_traces)
    leaked = []

    def activation(x):
        leaked.append(x)
        return x

    found, _ = made(activation)
    leaked.clear()
    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked trace"):
        found.compile_eval(BATCH)
