"""Errors of transforms."""

import jax
import pytest
from flax import nnx

import axcore as ax
from axcore.module import ContextError, cond, current, functional, invoke, remat, vmap, while_loop

from .layers import Parent, Plain
from .lifted import FULL, KEY, QUIET, SUMS, WIDTH, X, bits, build, call_inner, in_a_parent, rounds


def message(error):
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


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
    with pytest.raises(ContextError, match=r"top \(Holder\): the body of vmap writes "):
        invoke(model, "top", X)
    within = in_a_parent(lambda s, x: vmap(lambda s, x: remat(call_inner)(s, x))(s, x), FULL)
    with pytest.raises(ContextError, match=r"top \(Holder\): the body of vmap writes "):
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
    model = in_a_parent(lambda self, x: remat(lambda child, x: child(x))(self.inner, x))
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
