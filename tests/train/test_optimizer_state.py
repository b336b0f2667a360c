"""Optimizers whose state does not have the structure or the shapes of the parameters, and optimizers that fail."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.parallel import Mesh
from axcore.plugin import PluginError
from axcore.train import Learner, Optimizer
from axcore.train.step.program import program

LAYER = TransformerLayer.Config(
    attention=Attention.Config(num_heads=2, num_kv_heads=1), ffn=FeedForward.Config(hidden_dim=48)
)
MODEL = CausalLM.Config(vocab_size=11, dim=16, decoder=Repeat.Config(num_layers=2, layers=LAYER))


class Factored(Optimizer):
    """Keeps a momentum and a matrix of another shape per parameter, and a flat dict of paths."""

    def transformation(self, axes):
        def init(params):
            paths = {jax.tree_util.keystr(path): jnp.zeros(3) for path, _ in jax.tree.leaves_with_path(params)}
            return {"parts": jax.tree.map(self.part, params, axes), "flat": paths, "count": jnp.zeros((), jnp.int32)}

        def update(grads, state, params=None):
            del params
            part = lambda grad, held: {**held, "momentum": 0.9 * held["momentum"] + grad}  # noqa: E731
            parts = jax.tree.map(part, grads, state["parts"])
            return jax.tree.map(lambda grad, held: held["momentum"], grads, parts), {**state, "parts": parts}

        return optax.GradientTransformation(init, update)

    @staticmethod
    def part(param, names):
        assert len(names) == param.ndim
        return {"momentum": jnp.zeros_like(param), "factors": (jnp.zeros((param.shape[-1],) * 2), jnp.zeros(()))}


class Fails(Optimizer):
    class Config(Optimizer.Config):
        where: str = "init"

    def transformation(self, axes):
        def fails(name):
            if self.config.where == name:
                raise ValueError(f"no {name}")

        def update(grads, state, params=None):
            fails("update")
            return grads, state

        fails("transformation")
        return optax.GradientTransformation(lambda params: fails("init"), update)


def made(optimizer, layout=None):
    layout = layout or Mesh(shape={"data": 2, "fsdp": 4}).abstract(8, "cpu")
    return program(MODEL, Learner.Config(optimizer=optimizer), layout)


def test_case_optimizer_state_of_another_shape_is_replicated_and_the_rest_is_sharded_like_the_parameter():
    found = made(Factored.Config())
    parts = found.state.optimizer[1]["parts"]
    leaves = jax.tree.leaves_with_path(found.state.params)
    assert any(leaf.sharding.spec != PartitionSpec(None) for _, leaf in leaves)
    for path, param in leaves:
        held = parts
        for key in path:
            held = held[key.key]
        assert held["momentum"].sharding == param.sharding and held["momentum"].shape == param.shape
        square, scalar = held["factors"]
        # On a square of the same shape as the parameter, the rules of the parameter apply.
        assert square.sharding.spec == (param.sharding.spec if square.shape == param.shape else PartitionSpec())
        assert scalar.sharding.spec == PartitionSpec()
    flat = found.state.optimizer[1]["flat"]
    assert {leaf.sharding.spec for leaf in flat.values()} == {PartitionSpec()}


def test_the_state_of_adam_is_sharded_like_the_parameters():
    found = made(ax.train.AdamW.Config())
    (adam,) = [
        each
        for each in jax.tree.leaves(found.state.optimizer, is_leaf=lambda node: hasattr(node, "mu"))
        if hasattr(each, "mu")
    ]
    want = jax.tree.map(lambda leaf: leaf.sharding, found.state.params)
    for moments in (adam.mu, adam.nu):
        assert jax.tree.map(lambda leaf: leaf.sharding, moments) == want
    assert adam.count.sharding.spec == PartitionSpec()


@pytest.mark.parametrize("where", ["transformation", "init", "update"])
def test_case_an_optimizer_that_fails_is_named_with_file_and_line(where):
    ids = np.zeros((4, 8), np.int32)
    batch = {"inputs": ids, "targets": ids, "weights": np.ones((4, 8), np.float32)}
    told = rf"^learner\.optimizer failed at .*test_optimizer_state\.py:\d+: ValueError: no {where}"
    with pytest.raises(PluginError, match=told):
        made(Fails.Config(where=where), Mesh().make(jax.devices()[:1])).lower_train(batch)


def test_case_optimizer_state_of_another_shape_trains():
    ids = np.zeros((4, 8), np.int32)
    batch = {"inputs": ids, "targets": ids, "weights": np.ones((4, 8), np.float32)}
    found = made(Factored.Config(), Mesh().make(jax.devices()[:1]))
    state, metrics = jax.eval_shape(found.train_step, found.state, batch)
    assert jax.tree.map(lambda leaf: leaf.shape, state.optimizer) == jax.tree.map(
        lambda leaf: leaf.shape, found.state.optimizer
    )
    assert metrics["loss"].shape == ()


class Misshapen(Optimizer):
    """Returns a wrong value from one of its functions."""

    class Config(Optimizer.Config):
        wrong: str

    config: Config

    def transformation(self, axes):
        def update(grads, state, params=None):
            cut = jax.tree.map(lambda grad: grad[..., :1], grads) if self.config.wrong == "updates" else grads
            return cut, {"steps": 0} if self.config.wrong == "state" else state

        made = optax.GradientTransformation(lambda params: {"count": jnp.zeros(3)}, update)
        return None if self.config.wrong == "transformation" else made


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("transformation", r"Misshapen\.transformation must return an optax\.GradientTransformation, not NoneType"),
        ("updates", r"update must return updates with the .* of its arguments, but a is \(2, 1\), expected \(2, 3\)"),
        ("state", r"update must return the state with the .*, but 1\.steps is \(\), expected none"),
    ],
)
def test_case_what_an_optimizer_returns_is_checked_and_names_it(wrong, message):
    with pytest.raises(ax.ConfigError, match=rf"learner\.optimizer.*: {message}"):
        learner = Learner.Config(optimizer=Misshapen.Config(wrong=wrong)).build({"a": (None, None)})
        params = {"a": jnp.ones((2, 3))}
        learner.update(params, learner.init(params), params, jnp.int32(0), jnp.int32(9))
