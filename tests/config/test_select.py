"""Selections and edits of nodes."""

import pickle

import pytest
from hypothesis import assume, given, strategies as st

from axcore.config import AxcoreError, Config, ConfigError, Configurable, Modifier, pipe, select, text

from .trees import Branch, Leaf, Other, SpecialLeaf, below, nodes, replaced, trees


class Layer(Configurable):
    class Config(Config):
        width: int = 1
        bias: bool = False
        scale: float | None = None
        inner: Config | None = None


class Wide(Layer):
    pass


class Sparse(Layer):
    class Config(Layer.Config):
        experts: int = 4


class Typed(Config):
    slot: Layer.Config = Layer.Config()


ROOT = Branch(
    left=Layer.Config(width=2, inner=Sparse.Config()),
    right=Wide.Config(width=3),
    items=(Leaf(value=1), SpecialLeaf(value=2), Other()),
)


def paths(selection):
    return [path for path, _ in selection]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("left", ["left"]),
        ("**.inner", ["left.inner"]),
        ("items.*", ["items.0", "items.1", "items.2"]),
        (Layer, ["left", "left.inner", "right"]),
        (Layer.Config, ["left", "left.inner", "right"]),
        (Sparse, ["left.inner"]),
        (Leaf, ["items.0", "items.1"]),
        (SpecialLeaf, ["items.1"]),
        (Config, ["", "left", "left.inner", "right", "items.0", "items.1", "items.2"]),
        (lambda path, node: getattr(node, "width", 0) > 1, ["left", "right"]),
        (lambda path, node: path.endswith("2"), ["items.2"]),
    ],
)
def test_a_path_a_type_with_its_subclasses_or_a_predicate_selects(where, expected):
    selection = select(ROOT, where)
    assert paths(selection) == expected
    assert len(selection) == len(expected)


def test_expect_checks_the_number_of_matches():
    assert len(select(ROOT, Leaf, expect=2)) == 2
    with pytest.raises(ConfigError) as error:
        select(ROOT, Leaf, expect=1)
    assert "matches 2 nodes, expected 1" in str(error.value)
    assert "items.0" in str(error.value)
    assert "items.1" in str(error.value)


@pytest.mark.parametrize("where", [3, ["left"], None])
def test_a_value_that_selects_nothing_raises(where):
    with pytest.raises(ConfigError, match=r"^where=.* must be a pattern, a class, or a function"):
        select(ROOT, where)


def test_no_match_of_a_path_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"nothing in the config matches 'lefd'.*Did you mean 'left'"):
        select(ROOT, "lefd")
    with pytest.raises(ConfigError, match=r"Did you mean 'left.inner'"):
        select(ROOT, "left.iner")


def test_no_match_of_a_type_lists_the_types_in_the_tree():
    class Absent(Configurable):
        pass

    with pytest.raises(ConfigError) as error:
        select(ROOT, Absent)
    assert "Absent" in str(error.value)
    for held in ("Layer", "Sparse", "Leaf"):
        assert held in str(error.value)


def test_no_match_of_a_predicate_raises():
    with pytest.raises(ConfigError, match="nothing in the config matches"):
        select(ROOT, lambda path, node: False)


def test_set_changes_every_selected_node():
    new = select(ROOT, Layer).set(width=9)
    assert [node.width for _, node in select(new, Layer)] == [9, 9, 9]
    assert [node.width for _, node in select(ROOT, Layer)] == [2, 1, 3]


def test_setting_a_wrong_value_names_the_path():
    with pytest.raises(ConfigError, match=r"at left: .*width must be int, not 'x'"):
        select(ROOT, "left").set(width="x")
    with pytest.raises(ConfigError, match=r"at left: .*no field 'widht'\. Did you mean 'width'"):
        select(ROOT, "left").set(widht=2)


def test_an_error_at_the_root_names_the_root():
    with pytest.raises(ConfigError, match=r"at the root: "):
        select(ROOT, "").set(nothing=1)


def test_map_passes_the_path_and_the_node():
    new = select(ROOT, Layer).map(lambda path, node: node.set(width=len(path)))
    assert [(path, node.width) for path, node in select(new, Layer)] == [("left", 4), ("left.inner", 10), ("right", 5)]


def test_map_edits_children_before_parents():
    def add(path, node):
        return node.set(width=10 * node.width + (node.inner.width if node.inner else 0))

    new = select(ROOT, Layer).map(add)
    assert new.left.inner.width == 10
    assert new.left.width == 30


def test_an_edit_that_does_not_return_a_config_raises_and_names_the_path():
    with pytest.raises(ConfigError, match="left"):
        select(ROOT, "left").map(lambda path, node: "not a node")


def test_swap_replaces_nodes():
    new = select(ROOT, "left.inner").swap(Wide.Config(width=5))
    assert new.left.inner == Wide.Config(width=5)
    assert ROOT.left.inner == Sparse.Config()


def test_swap_that_would_lose_a_set_field_raises_and_names_it():
    with pytest.raises(ConfigError, match=r"at right: .*would lose width=3"):
        select(ROOT, "right").swap(Sparse.Config())


def test_swap_keeps_drops_or_takes_a_new_value():
    kept = select(ROOT, "right").swap(Sparse.Config(experts=8), keep=("width",))
    assert kept.right == Sparse.Config(experts=8, width=3)
    dropped = select(ROOT, "right").swap(Sparse.Config(experts=8), drop=("width",))
    assert dropped.right == Sparse.Config(experts=8, width=1)
    anew = select(ROOT, "right").swap(Sparse.Config(width=7))
    assert anew.right.width == 7


def test_keeping_a_field_that_the_new_node_lacks_raises():
    with pytest.raises(ConfigError, match=r"at left.inner: .*no field 'experts'"):
        select(ROOT, "left.inner").swap(Wide.Config(), keep=("experts",))


def test_keeping_a_field_that_the_old_node_lacks_raises():
    with pytest.raises(AxcoreError, match=r"widht"):
        select(ROOT, "right").swap(Sparse.Config(), keep=("widht",))


def test_swap_for_a_type_that_does_not_fit_the_slot_names_the_path():
    with pytest.raises(ConfigError) as error:
        select(Branch(left=Typed()), "left.slot").swap(Leaf())
    assert "Typed.slot must be" in str(error.value)
    assert "left" in str(error.value)


def test_swapping_the_root_returns_the_new_node():
    assert select(Layer.Config(), "").swap(Sparse.Config()) == Sparse.Config()


def test_a_selection_can_be_iterated_more_than_once():
    selection = select(ROOT, Leaf)
    assert list(selection) == list(selection) != []


@given(trees, st.data())
def test_editing_one_node_equals_a_tree_made_by_hand(tree, data):
    by_path = nodes(tree)
    segments = data.draw(st.sampled_from(list(by_path)))
    before, frozen = text(tree), pickle.dumps(tree)
    new = select(tree, ".".join(segments)).map(lambda path, node: Other(value=42))
    assert new == replaced(tree, segments, Other(value=42))
    assert text(tree) == before
    assert pickle.loads(frozen) == tree


@given(trees, st.integers(10, 20))
def test_setting_by_type_changes_exactly_the_nodes_of_that_type(tree, value):
    before = nodes(tree)
    assume(any(isinstance(node, Leaf) for node in before.values()))
    after = nodes(select(tree, Leaf).set(value=value))
    assert after.keys() == before.keys()
    for segments, node in before.items():
        if isinstance(node, Leaf):
            assert after[segments] == type(node)(**{**dict(below(node)), "value": value})
        else:
            assert type(after[segments]) is type(node)
    assert all(node.value < 10 for node in before.values() if isinstance(node, Leaf))


@given(trees)
def test_subtrees_without_a_match_are_shared(tree):
    assume(any(isinstance(node, Other) for node in nodes(tree).values()))
    new = select(tree, Other).set(value=50)

    def check(old, new):
        if not any(isinstance(node, Other) for node in nodes(old).values()):
            assert new is old
            return
        for (name, old_part), (new_name, new_part) in zip(below(old), below(new), strict=True):
            assert name == new_name
            if isinstance(old_part, Config | tuple | dict) or hasattr(old_part, "items"):
                check(old_part, new_part)

    check(tree, new)


def test_pipe_applies_modifiers_from_left_to_right():
    double = Modifier("double", lambda cfg: cfg.set(width=cfg.width * 2))
    assert pipe(Layer.Config(width=3), lambda cfg: cfg.set(width=cfg.width + 1), double).width == 8
    assert pipe(Layer.Config(width=3)).width == 3


def test_pipe_names_a_modifier_that_returns_none():
    def forgetful(cfg):
        cfg.set(width=2)

    with pytest.raises(ConfigError, match=r"modifier .*forgetful returned NoneType"):
        pipe(Layer.Config(), forgetful)
    with pytest.raises(ConfigError, match=r"modifier named returned int"):
        pipe(Layer.Config(), Modifier("named", lambda cfg: 3))


def test_the_text_of_a_modifier_shows_its_name_and_options():
    assert str(Modifier("moe", lambda cfg: cfg, {"num_experts": 8, "mode": "x"})) == "moe(num_experts=8, mode='x')"


def test_selecting_an_empty_slot_raises_and_explains_how_to_fill_it():
    from axcore.testing import tiny_model

    with pytest.raises(ConfigError, match=r"empty slot: select 'decoder\.layers\.attention' and set position="):
        select(tiny_model(), "decoder.layers.attention.position")


def test_an_edit_that_reads_an_unknown_field_raises_and_names_the_path():
    from axcore.nn import FeedForward
    from axcore.testing import tiny_model

    with pytest.raises(ConfigError, match=r"at decoder\.layers\.ffn: .* has no field 'position'"):
        select(tiny_model(), FeedForward).map(lambda _, node: node.set(gate=node.position))
