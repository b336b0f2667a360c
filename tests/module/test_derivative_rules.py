"""Layers that are called in the rules of `custom_vjp` and `custom_jvp`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.module import ContextError, Reduce, current, custom_jvp, custom_vjp, invoke, vmap

from .layers import Plain, Stacked
from .lifted import KEY, WIDTH, X, assert_same, holder, in_a_parent, measure


@pytest.mark.long
def test_rules_have_the_path_and_draw_the_bits_of_their_call():
    """Dropout whose backward rule draws the mask again."""
    seen = []

    def mask(x):
        seen.append((current().path, current().training))
        return jax.random.bernoulli(current().rng("mask"), 0.5, x.shape)

    def masked(self, x):
        before = jax.random.bernoulli(self.rng("mask"), 0.5, x.shape)
        ruled = custom_vjp(
            lambda x: x * mask(x), lambda x: (x * mask(x), jnp.zeros_like(x)), lambda zeros, g: (g * mask(zeros),)
        )
        inside = ruled(self.inner(x))
        after = jax.random.bernoulli(self.rng("mask"), 0.5, x.shape)
        return inside + before.astype(x.dtype) + 10 * after

    def plain(self, x):
        before = jax.random.bernoulli(self.rng("mask"), 0.5, x.shape)
        inside = self.inner(x)
        inside = inside * jax.random.bernoulli(self.rng("mask"), 0.5, x.shape)
        after = jax.random.bernoulli(self.rng("mask"), 0.5, x.shape)
        return inside + before.astype(x.dtype) + 10 * after

    def jvped(self, x):
        before = jax.random.bernoulli(self.rng("mask"), 0.5, x.shape)
        ruled = custom_jvp(lambda x: x * mask(x), lambda x, t: ((m := mask(x[0])) * x[0], m * t[0]))
        inside = ruled(self.inner(x))
        after = jax.random.bernoulli(self.rng("mask"), 0.5, x.shape)
        return inside + before.astype(x.dtype) + 10 * after

    x = jnp.tile(X, (4, 4))
    child = Plain.Config(width=4 * WIDTH, drop=True)
    for run in (masked, jvped):
        assert_same(measure(holder(run, child), x), measure(holder(plain, child), x))
        assert_same(
            measure(Stacked.Config(layer=holder(run, child), count=2), x),
            measure(Stacked.Config(layer=holder(plain, child), count=2), x),
        )
    assert set(seen) == {("", True), ("layers.*", True)}


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
def test_rules_may_report_summaries_of_any_type(kind, differentiated):
    def value(x):
        current().add_summary("max", x.max(), Reduce.MAX)
        current().add_summary("count", (x > 1).sum(), Reduce.SUM)
        return x**2

    def run(self, x):
        if kind == "custom_vjp":
            return custom_vjp(value, lambda x: (value(x), x), lambda x, g: (3 * x * g,))(x)
        return custom_jvp(value, lambda x, t: (value(x[0]), 3 * x[0] * t[0]))(x)

    model = in_a_parent(lambda self, x: vmap(run)(self, x))

    def call(x):
        output, collections = invoke(model, "top", x, key=KEY)
        return output.sum(), collections.summaries

    if differentiated:
        (value_, summaries), grad = jax.jit(jax.value_and_grad(call, has_aux=True))(X)
        np.testing.assert_allclose(grad, 3 * X, rtol=1e-6)
    else:
        value_, summaries = call(X)
    np.testing.assert_allclose(value_, np.sum(np.asarray(X) ** 2), rtol=1e-6)
    np.testing.assert_allclose(summaries["top.max"].value, X.max())
    assert int(summaries["top.count"].value) == int((X > 1).sum())


def test_a_loss_in_a_rule_raises():
    def value(x):
        current().add_loss("aux", x.sum(), 1)
        return x

    for run in (
        lambda self, x: custom_vjp(value, lambda x: (value(x), None), lambda _, g: (g,))(x),
        lambda self, x: custom_jvp(value, lambda x, t: (value(x[0]), t[0]))(x),
    ):
        with pytest.raises(ContextError, match=r"top\.aux: .*no gradient"):
            invoke(in_a_parent(run), "top", X)


def test_a_report_in_a_backward_rule_raises_and_names_the_layer():
    def bwd(_, g):
        current().add_summary("gradient", g.max())
        return (g,)

    model = in_a_parent(lambda self, x: custom_vjp(lambda x: x, lambda x: (x, None), bwd)(x))
    with pytest.raises(ContextError, match=r"top\.gradient: a backward rule cannot report"):
        jax.grad(lambda x: invoke(model, "top", x)[0].sum())(X)
