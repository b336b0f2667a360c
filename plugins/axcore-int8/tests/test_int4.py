"""The stored form of INT4 weights, against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Linear
from axcore.plugin.features import use_text
from axcore_int8.int4 import Int4


def numerics(shape, input_axis=-2, size=32):
    return Int4.Config(shape=shape, input_axis=input_axis, group_size=size).build(rngs=ax.Rngs(0))


def expected(matrix, size):
    """(codes, rounded matrix) of a matrix [in, out]."""
    codes, whole = np.zeros(matrix.shape, int), np.zeros(matrix.shape)
    for start in range(0, len(matrix), size):
        group = matrix[start : start + size]
        lowest = group.min(0).astype(ml_dtypes.bfloat16).astype(float)
        scale = ((group.max(0) - group.min(0)) / 15).astype(ml_dtypes.bfloat16).astype(float)
        found = np.clip(np.rint((group - lowest) / scale), 0, 15)
        codes[start : start + size], whole[start : start + size] = found, found * scale + lowest
    return codes, whole


@pytest.mark.parametrize(("inputs", "size"), [(128, 64), (71, 32)])
@pytest.mark.parametrize("kind", ["linear", "grouped", "embedding"])
def test_codes_are_packed_in_pairs_and_decoded(inputs, size, kind):
    shape = {"linear": (inputs, 5), "grouped": (3, inputs, 5), "embedding": (5, inputs)}[kind]
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    layer = numerics(shape, -1 if kind == "embedding" else -2, size)
    stored = layer.encode(jnp.asarray(weight))
    found, packed = np.asarray(layer.decode(stored)), np.asarray(stored["codes"])
    groups = -(-inputs // size)
    assert stored["codes"].dtype == jnp.uint8 and stored["scales"].dtype == stored["offsets"].dtype == jnp.bfloat16
    matrices, decoded, bytes_ = [weight], [found], [packed]
    if kind == "grouped":
        matrices, decoded, bytes_ = weight, found, packed
        assert stored["scales"].shape == stored["offsets"].shape == (3, groups, 5)
    elif kind == "embedding":
        matrices, decoded, bytes_ = [weight.T], [found.T], [packed.T]
        assert stored["scales"].shape == (5, groups)
    for matrix, mine, pairs in zip(matrices, decoded, bytes_, strict=True):
        codes, whole = expected(matrix, size)
        np.testing.assert_allclose(mine, whole, atol=1e-6)
        np.testing.assert_array_equal(pairs & 15, codes[::2])
        np.testing.assert_array_equal((pairs >> 4)[: len(codes) // 2], codes[1::2])


def test_constants_and_zeros_are_exact():
    weight = jnp.zeros((64, 2)).at[:32, 0].set(0.5)
    layer = numerics(weight.shape)
    np.testing.assert_array_equal(layer.decode(layer.encode(weight)), weight)


def test_rows_of_an_embedding_are_those_of_the_table():
    table = jax.random.normal(jax.random.key(0), (9, 40))
    layer, ids = numerics(table.shape, -1), jnp.asarray([[3, 0], [8, 3]])
    stored = layer.encode(table)
    np.testing.assert_array_equal(layer.gather(ids, stored), layer.decode(stored)[ids])
    np.testing.assert_allclose(layer.gather(ids, table), layer.decode(stored)[ids], atol=1e-6)


def test_only_listed_group_sizes_are_supported():
    with pytest.raises(ax.ConfigError, match="group_size"):
        numerics((2, 3), size=16)


@pytest.mark.parametrize("feature", ["int8:activation_scales=None", "int4"])
def test_models_without_layers_require_where(feature):
    with pytest.raises(ax.ConfigError, match="no stack of layers"):
        use_text(feature)(Linear.Config(input_dim=4, output_dim=4))
