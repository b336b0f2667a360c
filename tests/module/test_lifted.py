"""Transforms of functions that call layers, compared with the same code without transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import Reduce, cond, current, custom_jvp, custom_vjp, functional, invoke, remat, vmap, while_loop
from axcore.module.collections import histogram

from .layers import Plain, Stacked
from .lifted import (
    KEY,
    QUIET,
    SUMS,
    WIDTH,
    X,
    assert_same,
    bits,
    build,
    call_inner,
    holder,
    in_a_parent,
    measure,
    rounds,
)


def always(x):
    """True, and traced."""
    return (0 * x).sum() == 0


# Pairs of functions with equal results: without the transform and with it. `self` and `child` are the module that the
# transform receives.

SAME = {
    "remat, self": (call_inner, lambda self, x: remat(call_inner)(self, x)),
    "remat, child": (call_inner, lambda self, x: remat(lambda child, x: child(x))(self.inner, x)),
    "remat with a policy": (
        call_inner,
        lambda self, x: remat(call_inner, policy=jax.checkpoint_policies.dots_saveable)(self, x),
    ),
    "cond, self": (call_inner, lambda self, x: cond(always(x), call_inner, lambda s, x: s.inner(-x))(self, x)),
    "cond, child": (
        call_inner,
        lambda self, x: cond(x[0, 0] < 0, lambda c, x: c(-x), lambda c, x: c(x))(self.inner, x),
    ),
    "remat in cond": (
        call_inner,
        lambda self, x: cond(
            always(x), lambda s, x: remat(call_inner)(s, x), lambda s, x: remat(lambda c, x: c(2 * x))(s.inner, x)
        )(self, x),
    ),
    "cond in remat": (
        call_inner,
        lambda self, x: remat(lambda c, x: cond(always(x), lambda c, x: c(x), lambda c, x: c(2 * x))(c, x))(
            self.inner, x
        ),
    ),
    "custom_vjp": (
        lambda self, x: jnp.sin(self.inner(x)),
        lambda self, x: custom_vjp(jnp.sin, lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, g: (cosine * g,))(
            self.inner(x)
        ),
    ),
    "custom_jvp": (
        lambda self, x: jnp.sin(self.inner(x)),
        lambda self, x: custom_jvp(jnp.sin, lambda x, t: (jnp.sin(x[0]), jnp.cos(x[0]) * t[0]))(self.inner(x)),
    ),
    "custom_vjp in remat": (
        lambda self, x: jnp.sin(self.inner(x)),
        lambda self, x: remat(
            lambda s, x: custom_vjp(jnp.sin, lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, g: (cosine * g,))(
                s.inner(x)
            )
        )(self, x),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_values_gradients_draws_reports_and_variables_equal_the_plain_code(name):
    plain, transformed = SAME[name]
    assert_same(measure(holder(transformed)), measure(holder(plain)))


@pytest.mark.long
@pytest.mark.parametrize("name", SAME)
def test_they_equal_the_plain_code_in_a_scanned_stack(name):
    plain, transformed = SAME[name]
    found = measure(Stacked.Config(layer=holder(transformed), count=2))
    assert_same(found, measure(Stacked.Config(layer=holder(plain), count=2)))
    assert list(found["summaries"]) == ["layers.*.inner.mean"]


def test_transforms_work_without_jit_and_without_invoke():
    model, plain = build(SAME["remat, self"][1], QUIET), build(call_inner, QUIET)
    np.testing.assert_allclose(model(X), plain(X), rtol=1e-6)


def test_remat_does_not_change_draws_and_reports():
    def body(self, x):
        current().add_summary("here", x.mean(), Reduce.MAX)
        return (
            jnp.concatenate([bits(self.rng("a")), self.draw().ravel(), self.draw().ravel()]).astype(jnp.float32)
            * x[0, 0]
        )

    def run(self, x):
        return jnp.concatenate([self.draw().ravel(), bits(self.rng("a")), body(self, x), bits(self.rng("a"))])

    def rematted(self, x):
        return jnp.concatenate([self.draw().ravel(), bits(self.rng("a")), remat(body)(self, x), bits(self.rng("a"))])

    expected, plain = invoke(build(run), X, key=KEY)
    found, reported = invoke(build(rematted), X, key=KEY)
    np.testing.assert_array_equal(found, expected)
    assert reported.summaries["here"].reduce is plain.summaries["here"].reduce is Reduce.MAX
    assert list(reported.summaries) == list(plain.summaries) == ["here"]


@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: vmap(call_inner)(self, x),
        lambda self, x: vmap(lambda child, x: child(x))(self.inner, x),
        lambda self, x: vmap(call_inner, in_axes=1, out_axes=1)(self, x.T).T,
        lambda self, x: vmap(lambda s, a, b: s.inner(a) * b, in_axes=[0, None])(self, x, 1.0),
        lambda self, x: vmap(lambda s, x: s.inner(x["x"]), in_axes=({"x": 0, "skip": None},))(
            self, {"x": x, "skip": jnp.ones(2)}
        ),
        lambda self, x: remat(lambda s, x: vmap(call_inner)(s, x))(self, x),
        lambda self, x: vmap(lambda s, x: remat(lambda c, x: c(x))(s.inner, x))(self, x),
        lambda self, x: vmap(lambda s, x: cond(x[0] > 0, lambda c, x: c(x), lambda c, x: c(2 * x))(s.inner, x))(
            self, x
        ),
        lambda self, x: vmap(lambda s, x: vmap(call_inner)(s, x))(self, x[None])[0],
    ],
    ids=[
        "self",
        "child",
        "axes",
        "an unmapped argument",
        "a tree of axes",
        "in remat",
        "of remat",
        "of cond",
        "of vmap",
    ],
)
@pytest.mark.parametrize("stacked", [False, True], ids=["alone", "stacked"])
def test_vmap_equals_separate_calls_and_averages_reports(run, stacked):
    def wrap(cfg):
        return Stacked.Config(layer=cfg, count=2) if stacked else cfg

    found, silent = measure(wrap(holder(run, SUMS))), measure(wrap(holder(call_inner, SUMS)))
    assert_same(found, silent)  # the mean over rows of means over a row is the mean


def test_summaries_of_mapped_examples_are_reduced_by_their_rule():
    def body(self, x):
        for rule in Reduce:
            self.add_summary(rule.value, x.sum(), rule)
        self.add_histogram("spread", x)
        self.add_summary("whole", jnp.int32(3), Reduce.MAX)
        self.add_loss("loss", x.sum(), 1, 0.5)
        return x

    _, reported = invoke(in_a_parent(lambda self, x: vmap(body)(self, x)), "top", X)
    sums = np.asarray(X, np.float64).sum(1)
    for rule, value in {
        "mean": sums.mean(), "sum": sums.sum(), "max": sums.max(), "min": sums.min(), "last": sums[-1]
    }.items():  # fmt: skip
        np.testing.assert_allclose(reported.summaries[f"top.{rule}"].value, value, rtol=1e-6, err_msg=rule)
    np.testing.assert_allclose(reported.losses["top.loss"].mean(), 0.5 * sums.mean(), rtol=1e-6)
    np.testing.assert_array_equal(reported.summaries["top.spread"], histogram(X[-1]))
    assert int(reported.summaries["top.whole"].value) == 3


@pytest.mark.parametrize("stacked", [False, True], ids=["alone", "stacked"])
@pytest.mark.parametrize(
    "run",
    [
        rounds(lambda self, carry: (carry[0] + 1, self.inner(carry[1]))),
        lambda self, x: while_loop(lambda c: c[0] < 3, lambda child, c: (c[0] + 1, child(c[1])))(self.inner, (0, x))[1],
        rounds(lambda self, carry: (carry[0] + 1, remat(call_inner)(self, carry[1]))),
    ],
    ids=["self", "child", "of remat"],
)
def test_while_loop_equals_a_python_loop_and_carries_variables(run, stacked):
    def loop(self, x):
        for _ in range(3):
            x = self.inner(x)
        return x

    def both(run):
        cfg = holder(run, Plain.Config(width=WIDTH, counts=True))
        fn, params, state = functional((Stacked.Config(layer=cfg, count=2) if stacked else cfg).build(rngs=ax.Rngs(0)))

        def call(params, x):
            (output, _), new = fn(params, state, x, key=KEY)
            return output, new

        direction = jax.tree.map(jnp.cos, (params, X))
        return jax.jit(lambda: jax.jvp(call, (params, X), jax.tree.map(jnp.asarray, direction)))()

    found, expected = (jax.tree.leaves(both(each)) for each in (run, loop))
    for a, b in zip(found, expected, strict=True):
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_call_of_the_module_changes_variables_in_place():
    for run in (SAME["remat, self"][1], SAME["cond, child"][1]):
        model = build(run, Plain.Config(width=WIDTH, counts=True))
        model(X)
        first = int(model.inner.calls[...])
        model(X)
        assert int(model.inner.calls[...]) == 2 * first > 0


def test_only_one_branch_of_cond_may_write_a_variable():
    model = build(
        lambda self, x: cond(x[0, 0] > 0, call_inner, lambda self, x: x)(self, x),
        Plain.Config(width=WIDTH, counts=True),
    )
    model(-X)
    assert int(model.inner.calls[...]) == 0
    model(X)
    assert int(model.inner.calls[...]) > 0


@pytest.mark.parametrize(
    "inner",
    [
        lambda s, x: remat(lambda s, x: x * s.inner.scale[...])(s, x),
        lambda s, x: cond(x[0] > 0, lambda s, x: x, lambda s, x: 2 * x)(s, x),
        lambda s, x: while_loop(lambda c: c[0] < 1, lambda s, c: (c[0] + 1, c[1]))(s, (0, x))[1],
        lambda s, x: vmap(lambda s, x: x)(s, x),
    ],
    ids=["remat", "cond", "while_loop", "vmap"],
)
def test_an_unwritten_variable_does_not_prevent_a_transform_in_vmap(inner):
    model = build(lambda self, x: vmap(inner)(self, x), Plain.Config(width=WIDTH, counts=True))
    assert jax.jit(lambda x: model(x))(X).shape == X.shape
