"""JSON, the content hash and pickles of configs."""

import contextlib
import enum
import json
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import axcore as ax
from axcore.config import REQUIRED, Config, ConfigError, FrozenDict, content_hash, from_json, text, to_json
from axcore.module import DTypes
from axcore.nn import FanIn, Linear, Normal
from axcore.plugin import Recipe, recipe, registry

from .trees import Branch, Leaf, Other, trees


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.StrEnum):
    FAST = "fast"


def doubled(x):
    return 2 * x


class Values(Config):
    number: float = 0.5
    color: Color = Color.RED
    level: Level = Level.LOW
    mode: Mode = Mode.FAST
    function: Callable[..., Any] = doubled
    kind: type = Leaf
    spec: P = P()
    dtype: np.dtype = np.dtype("float32")
    table: Mapping[str, Any] = FrozenDict()
    anything: Any = None


def returned(cfg):
    return from_json(to_json(cfg))


def refused(content):
    with pytest.raises(ConfigError) as error:
        from_json(content if isinstance(content, str) else json.dumps(content))
    assert len(str(error.value)) < 500
    return str(error.value)


def name(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


# Round trips.


@given(trees)
def test_a_round_trip_preserves_values_text_hash_and_types(tree):
    again = returned(tree)
    assert again == tree and type(again) is type(tree)
    assert text(again) == text(tree) and content_hash(again) == content_hash(tree)
    assert to_json(again) == to_json(tree)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below, max_size=3),
    max_leaves=8,
)


@given(json_like)
def test_a_round_trip_preserves_nested_tuples_mappings_numbers_and_text(value):
    cfg = Values(anything=value)
    assert returned(cfg) == cfg
    assert text(returned(cfg)) == text(cfg)
    assert returned(Values(anything={"$type": value})) == Values(anything={"$type": value})


def test_a_round_trip_preserves_every_registered_recipe(tiny_on_path, fresh_registry):
    names = [offer.name for _, offer in registry().offers(Recipe)]
    assert {"quickstart", "llama2-7b", "tiny"} <= set(names)
    for each in names:
        cfg = recipe(each)
        again = returned(cfg)
        assert again == cfg, each
        assert text(again) == text(cfg) and content_hash(again) == content_hash(cfg), each


@pytest.mark.parametrize(
    "change",
    [
        {"color": Color.BLUE},
        {"level": Level.HIGH},
        {"function": len},
        {"function": jax.nn.silu},
        {"kind": Other},
        {"spec": P("data", None, ("fsdp", "tensor"))},
        {"spec": P(None)},
        {"dtype": np.dtype(jnp.bfloat16)},
        {"dtype": np.dtype(ml_dtypes.float8_e4m3fn)},
        {"dtype": np.dtype("int8")},
        {"table": {"a": {"b": {"c": (1, (2.5, None))}}, "": {}}},
        {"table": {"node": Leaf(value=3), "other": Values(number=0.0)}},
        {"anything": ((), ((),), [[]], {})},
        {"anything": "\u2028 \ud800 漢 \x00"},
        {"anything": FanIn()},
        {"anything": Linear.Config(init=Normal(stddev=0.1), dtypes=DTypes(param=jnp.bfloat16))},
        {"anything": np.float64(0.1)},
        {"anything": REQUIRED},
        {"number": REQUIRED},
        {"number": math.inf},
        {"number": -math.inf},
        {"number": -0.0},
        {"number": 5e-324},
        {"number": 1e300},
    ],
    ids=lambda change: re.sub(r" at 0x\w+", "", ascii(change)),  # the same in every worker
)
def test_a_round_trip_preserves_each_kind_of_value(change):
    ax.register(len)
    ax.register(Other)
    cfg = Values(**change)
    assert returned(cfg) == cfg
    assert text(returned(cfg)) == text(cfg)
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    json.loads(to_json(cfg), parse_constant=pytest.fail)  # strict JSON: no NaN, no Infinity


def test_a_round_trip_preserves_nan():
    assert math.isnan(returned(Values(number=math.nan)).number)
    assert text(returned(Values(number=math.nan))) == text(Values(number=math.nan))


def test_a_round_trip_preserves_identity():
    again = returned(Values(color=Color.BLUE, anything=REQUIRED))
    assert again.color is Color.BLUE and again.function is doubled and again.kind is Leaf
    assert again.anything is REQUIRED


def test_an_enum_member_as_default_registers_all_members():
    assert returned(Values(color=Color.BLUE)).color is Color.BLUE


def test_functions_of_one_factory_have_different_names():
    one, two = Values(function=jax.nn.initializers.normal(0.1)), Values(function=jax.nn.initializers.normal(0.2))
    assert content_hash(one) != content_hash(two)
    assert content_hash(one) == content_hash(Values(function=jax.nn.initializers.normal(0.1)))


def test_writing_a_value_that_cannot_be_read_back_raises():
    def local(x):
        return x

    for value in (local, lambda x: x, {1}, object(), np.int64(3), jax.nn.initializers.normal(0.3)):
        with pytest.raises(ConfigError, match=r"^table\.a\.1: .*cannot be written"):
            to_json(Values(table={"a": (0, value)}))
    with pytest.raises(ConfigError, match=r"Register it with axcore\.register"):
        to_json(Values(function=local))
    assert returned(Values(function=ax.register(local))).function is local


def test_register_accepts_a_name():
    def scale(x):
        return x

    ax.register(scale, "tests.scale")
    assert '"tests.scale"' in to_json(Values(function=scale))
    assert returned(Values(function=scale)).function is scale


def test_a_codec_also_applies_to_subclasses():
    class Point:
        def __init__(self, x):
            self.x = x

    class Special(Point):
        pass

    ax.register_codec(Point, ax.Codec("test_point", lambda point: [point.x], lambda content: Point(*content)))
    assert returned(Values(anything=Special(3))).anything.x == 3
    message = refused({"$type": name(Values), "anything": {"$test_point": [1, 2, 3]}})
    assert message.startswith("anything: not a config value")


# Errors.


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"$type": "os.system"}, ["the root: 'os.system' is not a config type", "Import the module"]),
        ({"$type": f"{name(Leaf)}s"}, [f"Did you mean '{name(Leaf)}'?"]),
        (
            {"$type": name(Branch), "left": {"$type": "subprocess.Popen"}},
            ["left: 'subprocess.Popen' is not a config type"],
        ),
        (
            {"$type": name(Branch), "items": [{"$type": name(Leaf)}, {"$type": "nope"}]},
            ["items.1: 'nope' is not a config type"],
        ),
        (
            {"$type": name(Branch), "table": {"$map": [["x", {"$type": "nope"}]]}},
            ["table.x: 'nope' is not a config type"],
        ),
        ({"$type": name(Leaf), "valeu": 3}, [f"the root: {name(Leaf)} has no field 'valeu'", "Did you mean 'value'?"]),
        ({"$type": name(Leaf), "value": "x"}, ["the root: ", ".value must be int, not 'x'"]),
        ({"$type": name(Branch), "left": {"$type": name(Leaf), "value": True}}, ["left: ", "value must be int"]),
        ({"$type": name(Branch), "left": {"$type": name(Leaf), "value": {"$type": name(Leaf)}}}, ["left: ", "int"]),
        ({"$type": name(Values), "function": {"$name": "os.system"}}, ["function: 'os.system' is not registered"]),
        ({"$type": name(Values), "function": {"$name": "builtins.eval"}}, ["function: 'builtins.eval'"]),
        ({"$type": name(Values), "function": {"$name": f"{__name__}.doubldd"}}, ["Did you mean"]),
        ({"$type": name(Values), "color": {"$name": f"{name(Color)}.GREEN"}}, ["color: ", "is not registered"]),
        (
            {"$type": name(Values), "anything": {"$nme": "len"}},
            ["anything: no codec is registered for '$nme'", "Did you mean"],
        ),
        ({"$type": name(Values), "anything": {"dtype": "float32"}}, ["anything: no codec is registered for 'dtype'"]),
        ({"$type": name(Values), "anything": {"$dtype": "float33"}}, ["anything: not a config value"]),
        ({"$type": name(Values), "anything": {"$float": "three"}}, ["anything: not a config value"]),
        ({"$type": name(Values), "anything": {"$float": [1]}}, ["anything: not a config value"]),
        ({"$type": name(Values), "anything": {"$name": ["len"]}}, ["anything: not a config value"]),
        ({"$type": name(Values), "anything": {"$name": "len", "more": 1}}, ["anything: not a config value"]),
        ({"$type": name(Values), "anything": {"$map": 3}}, ["anything: not a config value"]),
        ({"$type": name(Values), "anything": {"$map": [[1, 2, 3]]}}, ["anything: not a config value"]),
        ({"$type": name(Values), "anything": {"$map": [], "more": 1}}, ["anything: not a config value"]),
        ({"$type": name(Values), "anything": {}}, ["anything: not a config value"]),
        ({"$type": name(Values), "anything": [0, {"a": 1, "b": 2}]}, ["anything.1: not a config value"]),
        ({"$type": name(Leaf), "self": 1}, ["the root: "]),
        ({"$type": ["x"]}, ["the root: "]),
        ({"$type": None}, ["the root: None is not a config type"]),
        ({"$type": {"$type": name(Leaf)}}, ["the root: "]),
        ({"$map": []}, ["the outermost JSON value is not a config"]),
        ({}, ["the root: not a config value"]),
        ([], ["the outermost JSON value is not a config"]),
        (None, ["the outermost JSON value is not a config"]),
        (3, ["the outermost JSON value is not a config"]),
    ],
    ids=lambda value: json.dumps(value)[:60] if not isinstance(value, list) or value == [] else "",
)
def test_reading_an_invalid_value_raises_and_names_its_path(data, expected):
    message = refused(data)
    assert all(part in message for part in expected), message
    assert message.count("the root") <= 1


def test_the_path_is_added_even_if_the_message_starts_with_the_same_text():
    class Short(Config):
        t: Any = None

    message = refused({"$type": name(Short).removesuffix(".Config"), "t": {"$type": name(Leaf), "x": 1}})
    assert message.startswith(f"t: {name(Leaf)} has no field 'x'")


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, '{"$type":' * 100_000, '{"$map":[["a",' * 5_000, "[" * 900 + "]" * 900],
    ids=["lists", "types", "maps", "whole lists"],
)
def test_deep_nesting_raises(content):
    assert "nested too deeply" in refused(content)


def test_truncated_text_and_trailing_text_raise():
    content = to_json(Branch(left=Leaf(value=3), items=(Other(),), table={"x": Leaf()}))
    for cut in range(len(content) - 1):
        assert "JSON" in refused(content[:cut])
    assert "not JSON" in refused(content + "}")
    assert "not JSON" in refused(content.replace(":", "=", 1))
    assert "not JSON" in refused('{"$type": 1' + "0" * 5000 + "}")


@given(json_like, st.sampled_from(["$type", "$name", "$map", "$dtype", "$spec", "$float", "$required"]))
def test_reading_random_json_returns_a_config_or_raises_config_error(data, tag):
    for content in (data, {tag: data}, {"$type": name(Values), "anything": {tag: data}}):
        with contextlib.suppress(ConfigError):
            assert isinstance(from_json(json.dumps(content)), Config)


HOSTILE = """
import json, sys
from axcore.config import ConfigError, from_json
import axcore.parallel  # its codecs too
before, said = set(sys.modules), []
sys.meta_path.insert(0, type("Spy", (), {"find_spec": staticmethod(lambda name, *_: said.append(name))}))
for name in ("antigravity.Config", "this", "axcore_rope.rotary.Rotary", "wsgiref.simple_server.WSGIServer"):
    for data in ({"$type": name}, {"$name": name}, {"$dtype": name}, {"$spec": [name]}, {name: 1}):
        for content in (data, {"$type": "axcore.module.layer.DTypes", "param": data}):
            try:
                from_json(json.dumps(content))
            except ConfigError:
                pass
print(sorted(set(sys.modules) - before), said)
"""


def test_reading_never_imports_a_module():
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[] []"


# Hashes and pickles in other processes.

ELSEWHERE = """
import sys
import axcore as ax
from axcore.config import content_hash, from_json
cfg = ax.recipe("llama2-7b")
content = sys.stdin.read()
print(content_hash(cfg), content_hash(from_json(content)), from_json(content) == cfg)
"""


def test_the_hash_is_the_same_in_every_process():
    cfg = recipe("llama2-7b")
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], input=to_json(cfg), capture_output=True, text=True, env=env
    )
    assert done.stdout.split() == [content_hash(cfg)] * 2 + ["True"], done.stderr


@given(trees, trees)
def test_hashes_are_equal_if_and_only_if_texts_are(one, two):
    assert (content_hash(one) == content_hash(two)) == (text(one) == text(two))


def test_a_change_of_one_value_changes_the_hash():
    cfg = Branch(left=Leaf())
    assert content_hash(cfg) != content_hash(cfg.set(left=Leaf(value=1)))
    assert content_hash(Branch(left=Leaf())) != content_hash(Branch(left=Other(value=0)))
    assert content_hash(cfg) == content_hash(cfg.set(left=Leaf(value=1)).set(left=Leaf()))


@given(trees)
def test_pickling_preserves_history(tree):
    again = pickle.loads(pickle.dumps(tree))
    assert again == tree and str(again.history()) == str(tree.history())


def test_recipes_can_be_pickled():
    cfg = recipe("llama2-7b")
    assert pickle.loads(pickle.dumps(cfg)) == cfg


def test_a_value_without_attributes_is_shown():
    class Holder(Config):
        setting: object = None

    assert text(Holder(setting=object())).endswith("setting: <object object>\n")
