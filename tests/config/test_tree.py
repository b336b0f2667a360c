"""Paths through a config tree."""

import re

import pytest
from hypothesis import given, strategies as st

from axcore.config import ConfigError, get, put, text, walk
from axcore.config.tree import matches, transform

from .trees import Branch, Leaf, Other, SpecialLeaf, below, nodes, replaced, trees

ROOT = Branch(
    left=Branch(items=(Leaf(value=1), Other()), tag="inner"),
    right=SpecialLeaf(value=2),
    table={"x": Leaf(value=3)},
)


def reference_match(pattern, path):
    """The documented rule: `*` matches within one segment, `**` matches zero or more segments."""
    if not pattern:
        return not path
    first, *rest = pattern
    if first == "**":
        return any(reference_match(rest, path[index:]) for index in range(len(path) + 1))
    if not path:
        return False
    expression = "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in first)
    return re.fullmatch(expression, path[0]) is not None and reference_match(rest, path[1:])


def test_walk_visits_tuples_and_mappings_parents_first():
    assert [(path, type(node)) for path, node in walk(ROOT)] == [
        ("", Branch),
        ("left", Branch),
        ("left.items.0", Leaf),
        ("left.items.1", Other),
        ("right", SpecialLeaf),
        ("table.x", Leaf),
    ]


def test_get_reads_nodes_values_items_and_entries():
    assert get(ROOT, "") is ROOT
    assert get(ROOT, "left.items.0.value") == 1
    assert get(ROOT, "left.items") == ROOT.left.items
    assert get(ROOT, "table.x") is ROOT.table["x"]
    assert get(ROOT, "left.tag") == "inner"
    assert get(ROOT, "left.left") is None


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("left.itens", "left.items"),
        ("left.item", "left.items"),
        ("rihgt", "right"),
        ("right.valu", "right.value"),
        ("extra", "right.extra"),
    ],
)
def test_an_unknown_path_raises_and_suggests_the_nearest(path, suggestion):
    with pytest.raises(ConfigError) as error:
        get(ROOT, path)
    assert f"no {path!r}" in str(error.value)
    assert f"Did you mean {suggestion!r}?" in str(error.value)


@pytest.mark.parametrize(
    "path", ["left.items.2", "table.y", "right.value.deeper", "left.left.tag", ".", "left.", ".left"]
)
def test_get_and_put_of_a_missing_path_raise(path):
    with pytest.raises(ConfigError):
        get(ROOT, path)
    with pytest.raises(ConfigError):
        put(ROOT, path, 1)


@given(trees)
def test_walk_finds_every_node_under_the_path_that_get_reads(tree):
    expected = {".".join(segments): node for segments, node in nodes(tree).items()}
    found = dict(walk(tree))
    assert found.keys() == expected.keys()
    assert all(found[path] is expected[path] and get(tree, path) is expected[path] for path in expected)


@given(trees, st.data())
def test_put_equals_a_tree_made_by_hand_and_keeps_the_old_one(tree, data):
    segments = data.draw(st.sampled_from(list(nodes(tree))))
    before = text(tree)
    new = put(tree, ".".join(segments), Leaf(value=99))
    assert new == replaced(tree, segments, Leaf(value=99))
    assert text(tree) == before


@given(trees, st.data())
def test_put_shares_everything_outside_the_path(tree, data):
    segments = data.draw(st.sampled_from(list(nodes(tree))))
    new = put(tree, ".".join(segments), Leaf(value=99))
    old_part, new_part = tree, new
    for name in segments:
        old_below, new_below = dict(below(old_part)), dict(below(new_part))
        assert all(new_below[other] is old_below[other] for other in old_below if other != name)
        old_part, new_part = old_below[name], new_below[name]


@given(trees)
def test_transform_that_changes_nothing_returns_the_tree_itself(tree):
    assert transform(tree, lambda path, node: node) is tree


@given(trees)
def test_transform_visits_every_node_once_children_first(tree):
    seen = []
    transform(tree, lambda path, node: seen.append(path) or node)
    assert sorted(seen) == sorted(path for path, _ in walk(tree))
    for index, path in enumerate(seen):
        assert not any(later.startswith(f"{path}." if path else "") and later != path for later in seen[index + 1 :])


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a", "a.b", False),
        ("b", "a.b", False),
        ("*", "a", True),
        ("*", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.b.c", False),
        ("**", "a", True),
        ("**", "a.b.c", True),
        ("**", "", True),
        ("**.c", "c", True),
        ("**.c", "a.b.c", True),
        ("**.c", "a.b.cc", False),
        ("a.**", "a", True),
        ("a.**", "a.b.c", True),
        ("a.**", "ab.c", False),
        ("a.**.c", "a.c", True),
        ("a.**.c", "a.b.b.c", True),
        ("**.b.**", "a.b.c", True),
        ("layer*", "layers", True),
        ("layer*", "layer.a", False),
        ("*norm*", "ffn_norm", True),
        ("*_norm", "ffn_norm.x", False),
        ("a?b", "axb", True),
        ("a?b", "a.b", False),
        ("a+", "aa", False),
        ("a[b]", "ab", False),
        ("", "", True),
        ("", "a", False),
    ],
)
def test_a_glob_matches_as_documented(pattern, path, expected):
    assert matches(pattern, path) is expected


segments = st.lists(st.text("ab_1", min_size=1, max_size=3), min_size=1, max_size=4)
patterns = st.lists(st.sampled_from(["*", "**", "a*", "*b", "?", "a", "b", "a_1", "*_*"]), min_size=1, max_size=4)


@given(patterns, segments)
def test_a_glob_agrees_with_matching_segment_by_segment(pattern, path):
    assert matches(".".join(pattern), ".".join(path)) == reference_match(pattern, path)
