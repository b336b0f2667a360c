"""The products of layers and those that their gradients consist of, for floats and for integers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Batched, Blocks, Grouped, GroupedLinear, Plain, RaggedDot, Transposed, grouped_each

IN, OUT, ROWS = 5, 3, 24
SIZES = (8, 0, 16)
KINDS = ("plain", "transposed", "ragged", "blocks", "batched")


def case(kind):
    """(product, shapes of x, weight and y)."""
    groups = len(SIZES)
    if kind == "batched":
        return Batched(), (groups, ROWS, IN), (groups, IN, OUT), (groups, ROWS, OUT)
    if kind in ("plain", "transposed"):
        product, weight = (Plain(), (IN, OUT)) if kind == "plain" else (Transposed(), (OUT, IN))
        return product, (2, ROWS // 2, IN), weight, (2, ROWS // 2, OUT)
    block = 8 if kind == "blocks" else 1
    group = jnp.repeat(jnp.arange(groups), jnp.asarray(SIZES) // block, total_repeat_length=ROWS // block)
    matmul = Blocks(size=block) if kind == "blocks" else RaggedDot()
    return Grouped(jnp.asarray(SIZES, jnp.int32), group, ROWS, matmul), (ROWS, IN), (groups, IN, OUT), (ROWS, OUT)


def arrays(*shapes):
    random = np.random.default_rng(0)
    return tuple(random.integers(-127, 128, shape).astype(np.int8) for shape in shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_integers_are_those_of_floats(kind):
    product, *shapes = case(kind)
    x, weight, y_bar = arrays(*shapes)
    wide = [each.astype(np.float32) for each in (x, weight, y_bar)]
    x_bar, weight_bar = jax.vjp(product, wide[0], wide[1])[1](wide[2])
    found = product.input_gradient(y_bar, weight, jnp.int32), product.weight_gradient(x, y_bar, jnp.int32)
    for mine, theirs in zip(found, (x_bar, weight_bar), strict=True):
        assert mine.dtype == jnp.int32
        np.testing.assert_array_equal(mine, theirs)  # below 2**24
    floats = product.input_gradient(wide[2], wide[1]), product.weight_gradient(wide[0], wide[2])
    for mine, theirs in zip(floats, (x_bar, weight_bar), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_multiplies_each_output(kind):
    product, *shapes = case(kind)
    x, codes, y = arrays(*shapes)
    scales = product.largest(jnp.asarray(np.where(y > 0, y, 1), jnp.float32))
    scales = jnp.where(jnp.isfinite(scales), scales, 1)  # groups without rows
    expected = product(x.astype(np.float32), codes) * product.broadcast(scales)
    np.testing.assert_array_equal(product.scaled(x.astype(np.float32), codes, scales, jnp.float32), expected)
    assert product.scaled(jnp.asarray(x, jnp.bfloat16), codes, scales, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_largest_is_the_maximum_over_the_rows_of_each_matrix(kind):
    product, *_, shape = case(kind)
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    found = product.largest(jnp.asarray(values))
    if kind in ("plain", "transposed"):
        expected = values.reshape(-1, OUT).max(0)
    elif kind == "batched":
        expected = values.max(1)
    else:
        expected = np.full((len(SIZES), OUT), -np.inf)
        expected[0], expected[2] = values[:8].max(0), values[8:].max(0)
    np.testing.assert_array_equal(found, expected)
    assert (np.broadcast_to(product.broadcast(found), shape) >= values).all()


class Bump(ax.Layer):
    """An adapter that is not linear in x."""

    class Config(ax.Layer.Config):
        groups: int | None = None

    def __init__(self, cfg, *, rngs):
        pass

    def __call__(self, x, y, weight, product):
        return y + jnp.tanh(product(x, weight))


@pytest.mark.parametrize("adapted", [False, True])
def test_scaled_rows_of_a_grouped_layer_equal_scaled_results(adapted):
    """Also with a bias; with an adapter the result is scaled instead of the input."""
    adapter = Bump.Config() if adapted else None
    cfg = GroupedLinear.Config(groups=3, input_dim=IN, output_dim=OUT, use_bias=True, adapter=adapter)
    fn, params, state = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    params["bias"] = jnp.arange(9.0).reshape(3, 3)
    x, scale = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((1, (ROWS, IN)), (2, (ROWS,))))
    groups = Grouped.of(jnp.asarray(SIZES, jnp.int32), ROWS)

    def scaled(params, x, scale):
        return fn(params, state, x, groups, scale, method="grouped")[0][0]

    def after(params, x, scale):
        return fn(params, state, x, groups, method="grouped")[0][0] * scale[:, None]

    y_bar = jax.random.normal(jax.random.key(3), (ROWS, OUT))
    (found, pull), (expected, pull_expected) = (jax.vjp(each, params, x, scale) for each in (scaled, after))
    for mine, theirs in zip(
        jax.tree.leaves((found, pull(y_bar))), jax.tree.leaves((expected, pull_expected(y_bar))), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


class Counted(RaggedDot):
    """Computes a single product only if the stacks of matrices come alone."""

    def each(self, x, several, sizes, group, accumulate=None):
        CALLS.append(len(several))
        return super().each(x, several, sizes, group, accumulate)


CALLS: list[int] = []


@pytest.mark.parametrize("change", ["none", "adapter", "dtype"])
def test_equal_plain_layers_are_computed_together(change):
    adapter, dtypes = Bump.Config() if change == "adapter" else None, ax.DTypes()
    other = ax.DTypes(compute="bfloat16") if change == "dtype" else dtypes

    class Two(ax.Layer):
        class Config(ax.Layer.Config):
            pass

        def __init__(self, cfg, *, rngs):
            linear = GroupedLinear.Config(groups=3, input_dim=IN, output_dim=OUT, use_bias=True)
            self.a = self.child("a", linear.set(dtypes=dtypes), rngs)
            self.b = self.child("b", linear.set(dtypes=other, adapter=adapter), rngs)

        def __call__(self, x, groups):
            return grouped_each([self.a, self.b], x, groups), [self.a.grouped(x, groups), self.b.grouped(x, groups)]

    CALLS.clear()
    fn, params, state = ax.functional(Two.Config().build(rngs=ax.Rngs(0)))
    params["a"]["bias"] = jnp.arange(9.0).reshape(3, 3)
    groups = dataclasses.replace(Grouped.of(jnp.asarray(SIZES, jnp.int32), ROWS), matmul=Counted())
    together, alone = fn(params, state, jax.random.normal(jax.random.key(0), (ROWS, IN)), groups)[0][0]
    expected = [2] if change == "none" else []
    assert expected == CALLS
    for mine, theirs in zip(together, alone, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_head_of_one_row_does_not_copy_a_tied_embedding():
    """On CPU, a copy of the transposed table takes ten times as long as the product."""
    x, table = jnp.zeros((1, 1, 64)), jnp.zeros((512, 64))
    text = jax.jit(Transposed()).lower(x, table).compile().as_text()
    assert "f32[64,512]" not in text
