"""The products that the gradient of each product consists of, for floats and for integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.nn import Batched, Blocks, Grouped, Plain, RaggedDot, Transposed

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
