"""Random numbers in transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import cond, invoke, vmap, while_loop

from .layers import Draw, Parent, Stacked
from .lifted import KEY, X, bits, build, holder


def two_draws(self, _=None):
    return jnp.concatenate([bits(self.rng("a")), self.draw()[0].ravel()])


def rows_of(array):
    return {tuple(row) for row in np.asarray(array).reshape(-1, 2).tolist()}


class Draws(ax.Layer):
    """Writes the drawn bits into the next free row."""

    def __call__(self, found):
        index = found[3, 0].astype(jnp.int32)
        return found.at[index].set(bits(self.rng("a"))).at[3, 0].add(1)


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
