"""Transforms of functions that call layers, compared with the same code without transforms."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axcore as ax
from axcore.module import (
    ContextError,
    Reduce,
    cond,
    current,
    custom_jvp,
    custom_vjp,
    functional,
    invoke,
    labelled,
    remat,
    vmap,
    while_loop,
)
from axcore.module.collections import histogram

from .layers import Draw, Parent, Plain, Stacked

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


def message(error):
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


def call_inner(layer, x):
    return layer.inner(x)


def always(x):
    """True, and traced."""
    return (0 * x).sum() == 0


def bits(key):
    return jax.random.key_data(key).ravel()


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


def square_rows(self, x):
    return jnp.stack([self.inner(row) for row in x])


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


def two_draws(self, _=None):
    return jnp.concatenate([bits(self.rng("a")), self.draw()[0].ravel()])


def rows_of(array):
    return {tuple(row) for row in np.asarray(array).reshape(-1, 2).tolist()}


@pytest.mark.long
def test_draws_differ_between_examples_iterations_and_places_and_depend_only_on_the_path():
    def run(self, x):
        def round_(self, carry):
            index, found = carry
            return index + 1, found.at[index].set(two_draws(self))

        before = two_draws(self)
        mapped = vmap(two_draws)(self, x)
        child = vmap(lambda draw, _: draw()[0].ravel())(self.draw, x)
        again = vmap(two_draws)(self, x)
        _, looped = while_loop(lambda carry: carry[0] < 3, round_)(self, (0, jnp.zeros((3, 4), jnp.uint32)))
        return jnp.concatenate([part.ravel() for part in (before, mapped, child, again, looped, two_draws(self))])

    class Twice(Parent):
        def __call__(self, x):
            return jnp.concatenate([self.top(x), self.top(x)])

    def draws(children):
        model = Twice.Config(children=children).build(rngs=ax.Rngs(0))
        return jax.jit(lambda x: invoke(model, x, key=KEY)[0])(X)

    found = draws((("top", holder(run)),))
    assert len(rows_of(found)) == found.size // 2
    neighbours = (("other", Draw.Config()), ("top", holder(run)))
    np.testing.assert_array_equal(found, draws(neighbours))


def test_draws_of_examples_differ_from_draws_of_scanned_layers():
    stack = Stacked.Config(layer=Draws.Config(), count=3)

    def run(self, x):
        scanned = self.stack(jnp.zeros((4, 2), jnp.uint32))
        mapped = vmap(lambda layers, _: bits(layers.rng("a")))(self.stack, X)
        return jnp.concatenate([scanned[:3], mapped])

    class Both(Parent):
        def __call__(self, x):
            return run(self, x)

    found, _ = invoke(Both.Config(children=(("stack", stack),)).build(rngs=ax.Rngs(0)), X, key=KEY)
    assert len(rows_of(found)) == 6


class Draws(ax.Layer):
    """Writes the drawn bits into the next free row."""

    def __call__(self, found):
        index = found[3, 0].astype(jnp.int32)
        return found.at[index].set(bits(self.rng("a"))).at[3, 0].add(1)


def test_draws_after_cond_differ_from_draws_in_its_branches():
    def run(self, x):
        def draws(self, _):
            return two_draws(self), bits(self.rng("a"))

        def draws_nothing(self, _):
            return jnp.zeros(4, jnp.uint32), jnp.zeros(2, jnp.uint32)

        inside = cond(x[0, 0] > 0, draws, draws_nothing)(self, x)
        return jnp.concatenate([*inside, two_draws(self)])

    def swapped(self, x):
        inside = cond(x[0, 0] < 0, lambda s, _: jnp.zeros(4, jnp.uint32), two_draws)(self, x)
        return jnp.concatenate([inside, two_draws(self)])

    for each, count in ((run, 5), (swapped, 4)):
        found, _ = jax.jit(lambda x, each=each: invoke(build(each), x, key=KEY))(X)
        assert len(rows_of(found)) == count


def test_both_branches_of_cond_draw_the_same_bits_as_plain_code():
    def run(self, x, predicate):
        return jnp.concatenate([bits(self.rng("a")), cond(predicate, two_draws, two_draws)(self, x)])

    expected = invoke(build(lambda self, x: jnp.concatenate([bits(self.rng("a")), two_draws(self)])), X, key=KEY)[0]
    for predicate in (True, False):
        np.testing.assert_array_equal(invoke(build(lambda s, x, p=predicate: run(s, x, p)), X, key=KEY)[0], expected)


def rounds(body, count=3):
    return lambda self, x: while_loop(lambda carry: carry[0] < count, body)(self, (jnp.int32(0), x))[1]


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


# Rules of derivatives.


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


# Errors.


def over(transform):
    return {
        "remat": lambda m: remat(lambda m, x: x)(m, X),
        "vmap": lambda m: vmap(lambda m, x: x)(m, X),
        "cond": lambda m: cond(True, lambda m, x: x, lambda m, x: x)(m, X),
        "while_loop": lambda m: while_loop(lambda x: False, lambda m, x: x)(m, X),
    }[transform]


@pytest.mark.parametrize("transform", ["remat", "vmap", "cond", "while_loop"])
def test_a_module_that_the_caller_does_not_contain_raises(transform):
    stranger = build(call_inner).inner
    with pytest.raises(ContextError, match=rf"top \(Holder\) runs {transform} on a Plain that it does not contain"):
        invoke(in_a_parent(lambda self, x: over(transform)(stranger)), "top", X)
    with ax.module.root(None, key=None, training=False), pytest.raises(ContextError, match="outside any layer runs"):
        over(transform)(stranger)


@pytest.mark.parametrize("run", [lambda s, x: vmap(call_inner)(s, x), lambda s, x: vmap(lambda c, x: c(x))(s.inner, x)])
def test_writing_a_variable_in_vmap_raises(run):
    model = in_a_parent(run, Plain.Config(width=WIDTH, counts=True))
    with pytest.raises(ContextError, match=r"top \(Holder\) a layer writes a Variable inside vmap"):
        invoke(model, "top", X)
    within = in_a_parent(lambda s, x: vmap(lambda s, x: remat(call_inner)(s, x))(s, x), FULL)
    with pytest.raises(ContextError, match=r"top \(Holder\) a layer writes a Variable inside vmap"):
        invoke(within, "top", X, key=KEY)


def test_branches_with_different_reports_raise():
    model = in_a_parent(lambda self, x: cond(x[0, 0] > 0, call_inner, lambda self, x: x)(self, x), SUMS)
    with pytest.raises(ContextError, match=r"in top \(Holder\) one branch of cond reports .*top\.inner\.square"):
        invoke(model, "top", X)


def test_branches_with_different_results_raise_and_name_the_layer():
    model = in_a_parent(lambda self, x: cond(x[0, 0] > 0, call_inner, lambda self, x: x[0])(self, x), QUIET)
    with pytest.raises(TypeError) as error:
        invoke(model, "top", X)
    assert "top (Holder)" in message(error)


def test_reporting_in_while_loop_raises():
    model = in_a_parent(rounds(lambda self, carry: (carry[0] + 1, self.inner(carry[1]))), SUMS)
    with pytest.raises(ContextError, match=r"top\.inner\.mean, top\.inner\.square: .*while_loop"):
        invoke(model, "top", X)


def test_a_draw_without_a_key_in_a_transform_raises_and_names_the_layer():
    model = in_a_parent(SAME["remat, child"][1])
    with pytest.raises(ContextError, match=r"top\.inner \(Plain\) drew from the PRNG stream 'dropout'"):
        invoke(model, "top", X)
    model = in_a_parent(lambda self, x: remat(lambda child, x: bits(current().rng("a")))(self.inner, x))
    with pytest.raises(ContextError, match=r"top \(Holder\) drew"):
        invoke(model, "top", X)


@pytest.mark.parametrize("wrap", [lambda body: body, remat, vmap], ids=["plain", "remat", "vmap"])
def test_keeping_a_traced_value_in_an_attribute_raises(wrap):
    def keeps(self, x):
        self.kept = x
        return x

    fn, params, state = functional(in_a_parent(lambda self, x: wrap(keeps)(self, x)))
    with pytest.raises(ContextError, match=r"\(Holder\) stores a traced value in its attribute 'kept'"):
        jax.jit(lambda x: fn(params, state, "top", x)[0][0])(X)


def test_shared_modules_and_shared_variables_raise():
    class Shares(Parent):
        def __init__(self, cfg, *, rngs):
            super().__init__(cfg, rngs=rngs)
            self.again = self.child_

    class SharesVariable(Parent):
        def __init__(self, cfg, *, rngs):
            super().__init__(cfg, rngs=rngs)
            self.tied = nnx.List([self.child_.scale])

    for kind, name in ((Shares, "Plain"), (SharesVariable, "Param")):
        model = kind.Config(children=(("child_", QUIET),)).build(rngs=ax.Rngs(0))
        with pytest.raises(ContextError, match=rf"child_.*are the same {name}"):
            functional(model)


# Collections.


def test_labelled_splits_summaries_of_nested_stacks():
    cfg = Stacked.Config(layer=Stacked.Config(layer=holder(SAME["remat, child"][1], SUMS), count=2), count=3)
    summaries = jax.jit(lambda: invoke(cfg.build(rngs=ax.Rngs(0)), X, key=KEY)[1])().summaries
    whole = summaries["layers.*.layers.*.inner.mean"].value
    assert whole.shape == (3, 2)
    spelled = labelled(summaries)
    assert list(spelled) == [f"layers.{i}.layers.{j}.inner.mean" for i in range(3) for j in range(2)]
    np.testing.assert_array_equal([float(each) for each in spelled.values()], whole.ravel())


def test_labelled_splits_only_at_whole_segments():
    assert labelled({"p*q.*.r": [1, 2]}) == {"p*q.0.r": 1, "p*q.1.r": 2}
    pair = labelled({"a.*.b": (jnp.arange(2), {"c": jnp.arange(4).reshape(2, 2)})})
    assert list(pair) == ["a.0.b", "a.1.b"]
    np.testing.assert_array_equal(pair["a.1.b"][1]["c"], [2, 3])


@pytest.mark.parametrize(
    "values", [np.random.default_rng(0).normal(size=101), np.zeros(5), np.arange(12).reshape(3, 4)]
)
def test_a_histogram_equals_numpy(values):
    counts, edges = np.histogram(values.astype(np.float32), bins=30)
    found = histogram(jnp.asarray(values))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found[0], counts)
    np.testing.assert_allclose(found[1], edges[1:], rtol=1e-5, atol=1e-6)


def shows(self, x):
    self.add_output("half", x / 2)
    self.add_output("unwanted", x)
    return self.inner(x)


CAPTURING = {"plain": shows, "remat": lambda s, x: remat(shows)(s, x), "vmap": lambda s, x: vmap(shows)(s, x)}
CAPTURING["cond"] = lambda s, x: cond(x[0, 0] > 0, shows, shows)(s, x)


@pytest.mark.parametrize("name", CAPTURING)
def test_capture_selects_outputs_by_pattern(name):
    model = in_a_parent(CAPTURING[name], QUIET)
    output, reported = jax.jit(lambda x: invoke(model, "top", x, capture=["**.inner", "top.half"]))(X)
    assert sorted(reported.outputs) == ["top.half", "top.inner"]
    np.testing.assert_array_equal(reported.outputs["top.inner"], output)
    np.testing.assert_array_equal(reported.outputs["top.half"], X / 2)
    assert not invoke(model, "top", X)[1].outputs


@pytest.mark.parametrize("name", CAPTURING)
def test_capture_collects_the_outputs_of_each_scanned_layer(name):
    model = Stacked.Config(layer=holder(CAPTURING[name], QUIET), count=2).build(rngs=ax.Rngs(0))
    output, reported = jax.jit(lambda x: invoke(model, x, capture=["**.inner", "**.half"]))(X)
    assert sorted(reported.outputs) == ["layers.*.half", "layers.*.inner"]
    spelled = labelled(reported.outputs)
    np.testing.assert_array_equal(spelled["layers.1.inner"], output)
    np.testing.assert_allclose(spelled["layers.1.half"], spelled["layers.0.inner"] / 2, rtol=1e-6)


def test_concurrent_traces_have_separate_reports():
    barrier, found = threading.Barrier(2, timeout=600), {}

    def work(number):
        def body(self, x):
            barrier.wait()
            self.add_summary(f"of_{number}", x.sum())
            return self.inner(x)

        model = build(lambda self, x: remat(body)(self, x))
        found[number] = sorted(invoke(model, X, key=KEY, training=True)[1].summaries)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert found == {number: ["inner.mean", f"of_{number}"] for number in range(2)}
