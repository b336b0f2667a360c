"""Layers and comparisons for the tests of transforms."""

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore.module import functional, while_loop

from .layers import Draw, Parent, Plain

WIDTH, ROWS = 4, 3
KEY = jax.random.key(7)
X = jnp.linspace(0.5, 2.0, ROWS * WIDTH).reshape(ROWS, WIDTH)
QUIET = Plain.Config(width=WIDTH)
SUMS = Plain.Config(width=WIDTH, summary=True, loss_weight=0.3)
FULL = Plain.Config(width=WIDTH, drop=True, summary=True, loss_weight=0.3, counts=True)


def holder(run, child=FULL):
    """The config of a layer that computes `run(self, x)` and has the children `child` and `draw`."""

    class Holder(Parent):
        def __call__(self, x):
            return run(self, x)

    return Holder.Config(children=(("inner", child), ("draw", Draw.Config())))


def build(run, child=FULL):
    return holder(run, child).build(rngs=ax.Rngs(0))


def in_a_parent(run, child=FULL):
    return Parent.Config(children=(("top", holder(run, child)),)).build(rngs=ax.Rngs(0))


def measure(cfg, x=X):
    """All results of one compiled training call, including gradients of parameters and inputs."""
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))

    def objective(params, x):
        (output, collections), new_state = fn(params, state, x, key=KEY, training=True)
        return jnp.sum(output**2) + collections.total_loss(), (output, collections, new_state)

    call = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
    (value, (output, collections, state)), grads = call(params, x)
    return {
        "value": value,
        "gradients": grads,
        "output": output,
        "summaries": collections.summaries,
        "losses": collections.weighted_losses(),
        "state": state,
    }


def assert_same(found, expected):
    for part, tree in expected.items():
        assert jax.tree.structure(found[part]) == jax.tree.structure(tree), part
        for a, b in zip(jax.tree.leaves(found[part]), jax.tree.leaves(tree), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7, err_msg=part)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected["gradients"]))


def call_inner(layer, x):
    return layer.inner(x)


def bits(key):
    return jax.random.key_data(key).ravel()


def rounds(body, count=3):
    return lambda self, x: while_loop(lambda carry: carry[0] < count, body)(self, (jnp.int32(0), x))[1]
