"""Equality, hashes, differences and texts are exact: for arrays, numbers, order and functions, and at every depth."""

import copy
import math
import pickle
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.config import Config, ConfigError, FrozenDict, content_hash, diff, from_json, select, text, to_json


class Holder(Config):
    value: Any = None
    others: Mapping[str, Any] = FrozenDict()
    number: float = 0.0


class Scale:
    """An object without a repr of its own."""

    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return self.factor * x


def plus(amount):
    def add(x, more=amount):
        return x + more

    return add


def many(position, make=np):
    values = np.zeros(2000, np.float32)
    values[position] = 1
    return make.asarray(values)


DIFFERENT = {
    "one element of 2,000": (many(1000), many(1001)),
    "one element of 2,000, jax": (many(1000, jnp), many(1001, jnp)),
    "dtype": (np.zeros(3, np.float32), np.zeros(3, np.float64)),
    "shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "sign of zero": (0.0, -0.0),
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "array in a tuple": ((1, many(3)), (1, many(4))),
    "array in a mapping": ({"a": many(3)}, {"a": many(4)}),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "order of nodes": ({"a": Holder(), "b": Holder()}, {"b": Holder(), "a": Holder()}),
    "attributes of an object": (Scale(1), Scale(2)),
    "object of a method": (Scale(1).apply, Scale(2).apply),
    "default of an inner function": (plus(1), plus(2)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_case_different_values_are_different_everywhere(name):
    one, two = (Holder(value=value) for value in DIFFERENT[name])
    assert one != two
    assert one.diff(two) and text(one) != text(two) and content_hash(one) != content_hash(two)


EQUAL = {
    "array": (many(1000), many(1000)),
    "array of NumPy and of jax": (many(7), many(7, jnp)),
    "byte order": (np.arange(3, dtype="<i4"), np.arange(3, dtype=">i4")),
    "bfloat16": (np.ones(3, jnp.bfloat16), jnp.ones(3, jnp.bfloat16)),
    "NaN": (math.nan, float("nan")),
    "array of NaN": (np.full(2, np.nan), np.full(2, np.nan)),
    "set": ({1, 2}, frozenset({2, 1})),
}


@pytest.mark.parametrize("name", EQUAL)
def test_case_equal_values_are_equal_everywhere(name):
    one, two = (Holder(value=value) for value in EQUAL[name])
    assert one == two and hash(one) == hash(two) and content_hash(one) == content_hash(two) and not diff(one, two)
    for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert again == one and hash(again) == hash(one)


@pytest.mark.parametrize("value", [many(5), many(5, jnp), np.ones((2, 0)), np.array(2 + 1j), np.ones(3, jnp.bfloat16)])
def test_case_arrays_survive_json(value):
    again = from_json(to_json(Holder(value=value)))
    assert again == Holder(value=value)
    assert again.value.dtype == value.dtype
    np.testing.assert_array_equal(again.value, np.asarray(value))
    with pytest.raises(ValueError, match="read-only"):
        again.value[...] = 0


def test_case_arrays_are_copied_and_read_only():
    values = np.zeros(3)
    cfg = Holder(value=values, others={"a": [values]})
    values[0] = 1
    assert cfg.value[0] == 0 and cfg.others["a"][0][0] == 0
    with pytest.raises(ValueError, match="read-only"):
        cfg.value[0] = 1


def test_case_what_has_no_values_cannot_be_held():
    with pytest.raises(ConfigError, match="no values that a config can hold"):
        jax.eval_shape(lambda x: Holder(value=x).value, jnp.ones(3))
    with pytest.raises(ConfigError, match="arrays of numbers"):
        Holder(value=np.array([object()]))


def test_case_an_integer_in_a_field_of_floats_is_that_float():
    assert Holder(number=1) == Holder(number=1.0)
    assert text(Holder(number=1)) == text(Holder(number=1.0))


def test_case_no_address_in_histories_reprs_and_messages():
    def edit(x):
        return x

    from axcore.config import Modifier

    cfg = Modifier("mine", lambda node: node.set(value=edit), {"by": edit, "node": Holder(value=edit)})(Holder())
    shown = [str(cfg.history("value")), repr(cfg), repr(Holder(value=(cfg, Scale))), text(cfg)]
    with pytest.raises(ConfigError) as error:
        cfg.set(number=edit)
    with pytest.raises(ConfigError) as lost:
        select(cfg, Holder).swap(Other())
    for message in (*shown, str(error.value), str(lost.value)):
        assert "0x" not in message and "edit" in message


class Other(Config):
    pass


def nested(depth, link):
    cfg = Holder()
    for _ in range(depth):
        cfg = link(cfg)
    return cfg


LINKS = [
    lambda cfg: Holder(value=cfg),
    lambda cfg: Holder(value=(cfg,)),
    lambda cfg: Holder().set(others={"a": cfg}),
]


@pytest.mark.parametrize("link", LINKS)
def test_case_a_tree_500_deep_is_refused(link):
    with pytest.raises(ConfigError, match=r"Holder is 10[12] levels deep, and a config has at most 100"):
        nested(500, link)
    value = ()
    for _ in range(5000):
        value = [value]
    with pytest.raises(ConfigError, match="nested more than 100 levels deep"):
        Holder(value=value)


@pytest.mark.parametrize(("link", "depth"), list(zip(LINKS, (98, 49, 49), strict=True)))
def test_case_the_deepest_tree_can_be_used(link, depth):
    one, two = nested(depth, link), nested(depth, link)
    assert one == two and hash(one) == hash(two) and repr(one) == repr(two) and not one.diff(two)
    assert from_json(to_json(one)) == pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert select(one, lambda path, node: node.value is None and not node.others).set(number=2.0) != one
