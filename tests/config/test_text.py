"""The text form, and the difference of two trees."""

import enum
import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from axcore.config import (
    Config,
    ConfigError,
    Configurable,
    FrozenDict,
    diff,
    diff_flat,
    flatten,
    parse_text,
    select,
    text,
)
from axcore.config.text import Change

from .trees import Branch, Leaf, Other, SpecialLeaf, nodes, trees


class Color(enum.Enum):
    RED = 1


class Layer(Configurable):
    class Config(Config):
        width: int = 4
        name: str = "x"


class Twin(Layer):
    pass


class Values(Config):
    integer: int = 3
    number: float = 0.1
    flag: bool = True
    nothing: str | None = None
    word: str = "a b"
    quoted: str = 'say "hi"'
    lines: str = "a\nb"
    empty: str = ""
    many: tuple[int, ...] = (1, 2)
    single: tuple[int, ...] = (1,)
    none: tuple[int, ...] = ()
    nested: tuple[tuple[str, int], ...] = (("a", 1),)
    table: Mapping[str, int] = FrozenDict({"b": 1, "a": 2})
    color: Color = Color.RED
    function: Callable[..., Any] = math.sqrt
    kind: type = Leaf


AWKWARD = [
    "a: b",
    " leading",
    "trailing ",
    ": ",
    "x: 1\ny: 2",
    "\r\n",
    "\t\v\f",
    "\x1c\x1d\x1e",
    "\x85",
    "\u2028 and \u2029",
    "\\n",
    '"',
    "None",
    "é ∂ 漢 🜁",
    "\x00\x7f",
    "\ud800",
]


def test_text_has_one_line_per_value_in_declaration_order():
    assert text(Values()).splitlines() == [
        ".: tests.config.test_text.Values",
        "integer: 3",
        "number: 0.1",
        "flag: True",
        "nothing: None",
        'word: "a b"',
        'quoted: "say \\"hi\\""',
        'lines: "a\\nb"',
        'empty: ""',
        "many: (1, 2)",
        "single: (1,)",
        "none: ()",
        'nested: (("a", 1),)',
        'table: {"b": 1, "a": 2}',
        "color: tests.config.test_text.Color.RED",
        "function: math.sqrt",
        "kind: tests.config.trees.Leaf",
    ]


def test_text_shows_the_type_of_a_node_before_its_children():
    tree = Branch(left=Layer.Config(), items=(Leaf(value=1),), table={"x": Other()})
    assert text(tree).splitlines() == [
        ".: tests.config.trees.Branch",
        'tag: ""',
        "left: tests.config.test_text.Layer",
        "left.width: 4",
        'left.name: "x"',
        "right: None",
        "items.0: tests.config.trees.Leaf",
        "items.0.value: 1",
        'items.0.note: ""',
        "table.x: tests.config.trees.Other",
        "table.x.value: 7",
    ]
    assert tree.text() == text(tree)


def test_text_shows_required_fields():
    class Open(Config):
        from axcore.config import REQUIRED

        width: int = REQUIRED

    assert "width: REQUIRED\n" in text(Open())


@given(trees)
def test_a_tree_has_as_many_lines_as_nodes_and_values(tree):
    content = text(tree)
    lines = content.split("\n")
    assert lines.pop() == ""
    node_lines = [line for line in lines if line.split(": ", 1)[1].startswith("tests.")]
    assert len(node_lines) == len(nodes(tree))
    assert content == text(tree)
    assert len({line.split(": ", 1)[0] for line in lines}) == len(lines)


@given(trees)
def test_parse_text_inverts_text(tree):
    assert parse_text(text(tree)) == flatten(tree)


@pytest.mark.parametrize("word", AWKWARD, ids=ascii)
def test_parse_text_inverts_text_of_unusual_strings(word):
    cfg = Leaf(note=word)
    assert parse_text(text(cfg)) == flatten(cfg)
    assert text(cfg).count("\n") == 3


@given(st.text(), st.text())
def test_two_strings_have_the_same_text_only_if_they_are_equal(one, two):
    same = parse_text(text(Leaf(note=one))) == parse_text(text(Leaf(note=two)))
    assert same == (one == two)


@pytest.mark.parametrize("key", ["a: b", "line\nbreak", "a.b", "\u2028", ""], ids=ascii)
@pytest.mark.parametrize("value", [1, Leaf()], ids=["value", "node"])
def test_parse_text_inverts_text_of_unusual_mapping_keys(key, value):
    class Holder(Config):
        table: Mapping[str, Any] = FrozenDict()

    if isinstance(value, Config):
        with pytest.raises(ConfigError, match="key of a node"):
            Holder(table={key: value, "other": value})
        return
    cfg = Holder(table={key: value, "other": value})
    assert parse_text(text(cfg)) == flatten(cfg)
    renamed = Holder(table={"b": value, "other": value})
    assert diff(renamed, cfg)


def test_a_value_with_a_multiline_repr_is_one_line_of_text():
    class Matrix:
        def __repr__(self):
            return "Matrix([1, 2],\n       [3, 4])"

    class Holder(Config):
        matrix: Matrix = Matrix()
        after: int = 1

    assert text(Holder()).count("\n") == 3
    assert parse_text(text(Holder())) == flatten(Holder())


STABLE = """
import functools, math
from axcore.config import Config, text

def scale(x, by): return x * by

class Holder(Config):
    names: frozenset[str] = frozenset({"alpha", "beta", "gamma", "delta", "epsilon"})
    function: object = functools.partial(scale, by=2)
    loose: tuple[object, ...] = (math.sqrt, scale, int)

print(text(Holder()))
"""


def test_text_is_the_same_in_every_process():
    def run(seed, padding):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", f"_ = [object() for _ in range({padding})]\n{STABLE}"],
            capture_output=True,
            text=True,
            check=True,
            env=environ,
        ).stdout

    assert run("1", 10) == run("2", 50_000)


def test_text_never_contains_a_memory_address():
    class Holder(Config):
        function: Callable[..., Any] = functools.partial(max, 1)

    assert " at 0x" not in text(Holder())


def test_two_different_lambdas_raise_or_have_different_text():
    class Holder(Config):
        function: Callable[[float], float] = abs

    try:
        one, two = Holder(function=lambda x: x), Holder(function=lambda x: x + 1)
    except ConfigError:
        return
    assert diff(one, two)


def test_equal_trees_have_no_difference():
    tree = Branch(left=Layer.Config())
    assert not diff(tree, Branch(left=Layer.Config()))
    assert str(diff(tree, tree)) == "no difference"


def test_diff_shows_a_changed_value():
    old = Branch(left=Layer.Config())
    new = select(old, Layer).set(width=8)
    assert diff(old, new) == (Change("left.width", "4", "8"),)
    assert str(new.diff(old)) == "~ left.width: 4 -> 8"


def test_diff_shows_a_class_swap_with_equal_fields():
    old, new = Branch(left=Layer.Config()), Branch(left=Twin.Config())
    assert str(diff(old, new)) == "~ left: tests.config.test_text.Layer -> tests.config.test_text.Twin"


def test_diff_shows_additions_and_removals():
    old, new = Branch(left=Leaf()), Branch(left=SpecialLeaf(), items=(Other(),))
    assert sorted(map(str, diff(old, new))) == [
        "+ items.0.value: 7",
        "+ items.0: tests.config.trees.Other",
        "+ left.extra: 0.5",
        "- items: ()",
        "~ left: tests.config.trees.Leaf -> tests.config.trees.SpecialLeaf",
    ]
    assert {(change.path, change.new) for change in diff(new, old) if change.new is None} == {
        ("items.0", None),
        ("items.0.value", None),
        ("left.extra", None),
    }


def test_diff_shows_a_filled_slot_and_an_emptied_one():
    assert "~ left: None -> tests.config.trees.Other" in str(diff(Branch(), Branch(left=Other())))
    assert "- left.value: 7" in str(diff(Branch(left=Other()), Branch()))


@given(trees, trees)
def test_applying_a_diff_to_the_old_flat_form_yields_the_new_one(old, new):
    result = flatten(old)
    for change in diff(old, new):
        assert result.get(change.path) == change.old
        if change.new is None:
            del result[change.path]
        else:
            result[change.path] = change.new
    assert result == flatten(new)


@given(trees, trees)
def test_a_diff_is_empty_only_for_equal_trees(old, new):
    assert (not diff(old, new)) == (flatten(old) == flatten(new))
    assert not diff_flat(parse_text(text(old)), flatten(old))
    assert (old == new) == (not diff(old, new)) or type(old) is not type(new)
