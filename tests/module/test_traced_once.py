"""Equal modules share a trace, and give what separate traces give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import functional, traced_once

from .layers import Plain
from .lifted import KEY, WIDTH, X
from .test_share import Giver, Taker


class Loop(ax.Layer):
    """Layers in order, which share traces or not."""

    class Config(ax.Layer.Config):
        layers: tuple[ax.Layer.Config, ...]
        once: bool = True

    def __init__(self, cfg, *, rngs):
        self.layers = self.children("layers", cfg.layers, rngs)

    def __call__(self, x):
        def run(layer, x):
            TRACED.append(type(layer))
            return layer(x)

        call = traced_once(run) if self.config.once else run
        for layer in self.layers:
            x = call(layer, x)
        return x


TRACED = []
QUIET = Plain.Config(width=WIDTH, counts=True)
LOUD = Plain.Config(width=WIDTH, counts=True, summary=True, loss_weight=0.3)
DROP = Plain.Config(width=WIDTH, drop=True)
GIVE, TAKE = Giver.Config(), Taker.Config()


def results(layers, *, once, **options):
    fn, params, state = functional(Loop.Config(layers=layers, once=once).build(rngs=ax.Rngs(0)))
    TRACED.clear()
    return jax.jit(lambda *arrays: fn(*arrays, X, **options))(params, state), len(TRACED)


@pytest.mark.parametrize(
    ("layers", "options", "num_traced"),
    [
        ((QUIET,) * 4, {}, 1),
        ((LOUD, QUIET, LOUD, QUIET, LOUD), {}, 2),
        ((GIVE, TAKE, TAKE, GIVE, TAKE, Giver.Config(factor=3.0), TAKE), {}, 4),  # the first shares a new name
        ((DROP,) * 3, {"key": KEY, "training": True}, 3),
        ((LOUD,) * 3, {"capture": ("layers.1",)}, 3),
    ],
    ids=["equal", "of two kinds", "that share values", "random", "captured"],
)
def test_results_and_reports_are_those_of_separate_traces(layers, options, num_traced):
    found, count = results(layers, once=True, **options)
    expected, _ = results(layers, once=False, **options)
    assert count == num_traced
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-6)


def test_variables_that_are_not_written_keep_their_arrays():
    layers = Loop.Config(layers=(QUIET,) * 3).build(rngs=ax.Rngs(0))
    scales = [layer.scale.get_raw_value() for layer in layers.layers]
    ax.invoke(layers, X)
    assert all(layer.scale.get_raw_value() is scale for layer, scale in zip(layers.layers, scales, strict=True))


def test_equal_modules_are_lowered_once():
    layers = Loop.Config(layers=(QUIET,) * 5).build(rngs=ax.Rngs(0))
    fn, params, state = functional(layers)
    text = jax.jit(lambda *arrays: fn(*arrays, jnp.asarray(X))).lower(params, state).as_text()
    assert text.count("func.func private @body") == 1 and text.count("call @body") == 5


class Training(ax.Layer):
    def __call__(self, x):
        return 2 * x if self.training else x


class Kept(Loop):
    """A loop whose calls have one wrapped function."""

    class Config(Loop.Config):
        pass

    call = staticmethod(traced_once(lambda layer, x: layer(x)))

    def __call__(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def test_other_calls_trace_again():
    model = Kept.Config(layers=(Training.Config(),) * 3).build(rngs=ax.Rngs(0))
    found = [float(ax.invoke(model, jnp.float32(1), training=each)[0]) for each in (True, False, True)]
    assert found == [8, 1, 8]
