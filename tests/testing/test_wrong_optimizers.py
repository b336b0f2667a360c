"""`OptimizerSuite` fails for optimizers that are wrong in one way, and passes for a correct one."""

import jax
import jax.numpy as jnp
import optax
import pytest

from axcore.testing import OptimizerSuite
from axcore.train import AdamW, Optimizer

from .wrong import instance, names


def updates(function):
    """A transformation without state."""
    return optax.stateless(lambda grads, params: jax.tree.map(function, grads))


def optimizer(make):
    class Made(Optimizer):
        def transformation(self, axes):
            return make(axes)

    return Made


def flat_state(axes):
    """Keeps the momentum as vectors."""

    def init(params):
        return optax.TraceState(jax.tree.map(lambda leaf: jnp.zeros(leaf.size), params))

    def update(grads, state, params=None):
        trace = jax.tree.map(lambda grad, old: grad.ravel() + 0.9 * old, grads, state.trace)
        return jax.tree.map(lambda new, grad: new.reshape(grad.shape), trace, grads), optax.TraceState(trace)

    return optax.GradientTransformation(init, update)


def later_nan(axes):
    """The tenth update is NaN."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda grad: jnp.where(state == 9, jnp.nan, grad), grads), state + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def drop(axes):
    """Returns no update of the last parameter."""

    def update(grads, params):
        return dict(list(grads.items())[:1]) if "scale" in grads else grads

    return optax.stateless(update)


def by_first_axis(axes):
    """Divides by the norm of each row, which for a stack is a layer."""
    return updates(
        lambda g: g / (1e-8 + jnp.linalg.norm(g.reshape(len(g), -1), axis=1).reshape(-1, *[1] * (g.ndim - 1)))
    )


RIGHT = optimizer(lambda axes: optax.scale_by_adam())
WRONG = {
    "ascends": (lambda axes: optax.chain(optax.scale_by_adam(), optax.scale(-1.0)), "loss"),
    "by first axis": (by_first_axis, "stacked"),
    "cubes": (lambda axes: updates(lambda g: g**3 / (jnp.abs(g) ** 3 + 1e-8)), "zero and large"),
    "drops": (drop, "stacked"),
    "later NaN": (later_nan, "loss"),
    "no epsilon": (lambda axes: updates(lambda g: g / jnp.abs(g)), "zero and large"),
    "no update": (lambda axes: updates(jnp.zeros_like), "loss"),
    "norm of the stack": (lambda axes: updates(lambda g: g / (1e-8 + jnp.linalg.norm(g))), "stacked"),
    "own rate": (lambda axes: optax.chain(optax.scale_by_adam(), optax.scale(1e-3)), "loss"),
    "squares": (lambda axes: updates(lambda g: g / jnp.sqrt(g**2)), "zero and large"),
    "traced": (lambda axes: updates(lambda g: g / float(g.max())), "stacked"),
}
CHECKS = {
    "loss": "test_the_loss_falls",
    "stacked": "test_stacked_parameters_are_updated_like_separate_ones",
    "state": "test_state_is_sharded_like_the_parameters",
    "use": "test_use_sets_the_optimizer_of_the_learner",
    "zero and large": "test_zero_and_large_gradients_give_finite_updates",
}
LONG = ("by first axis", "no epsilon")


def suite(cfg, **attributes):
    return instance(OptimizerSuite, name="adamw", optimizer=lambda self: cfg, **attributes)


@pytest.mark.parametrize("name", names(WRONG, LONG))
def test_case_a_wrong_optimizer_fails(name):
    make, check = WRONG[name]
    with pytest.raises((AssertionError, jax.errors.ConcretizationTypeError)):
        getattr(suite(optimizer(make).Config()), CHECKS[check])()


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check != "use"])
def test_case_a_correct_optimizer_passes(check):
    getattr(suite(RIGHT.Config()), CHECKS[check])()


def test_case_optimizer_state_of_another_shape_is_declared():
    flat = optimizer(flat_state).Config()
    suite(flat, replicated=("trace.*",)).test_state_is_sharded_like_the_parameters()
    with pytest.raises(AssertionError, match=r"not sharded like its parameter: \['trace.weight'\]"):
        suite(flat).test_state_is_sharded_like_the_parameters()
    with pytest.raises(AssertionError, match=r"replicated contains \['mu.*'\]"):
        suite(RIGHT.Config(), replicated=("mu.*",)).test_state_is_sharded_like_the_parameters()


def test_case_an_offer_that_sets_another_optimizer_fails():
    suite(AdamW.Config()).test_use_sets_the_optimizer_of_the_learner()
    with pytest.raises(AssertionError):
        suite(AdamW.Config(b1=0.5)).test_use_sets_the_optimizer_of_the_learner()
