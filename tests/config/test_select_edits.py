"""Edits of selected nodes: wrap, remove, insert, tags, and their errors."""

import pytest
from hypothesis import assume, given, strategies as st

from axcore.config import Config, ConfigError, Configurable, select, tagged, text

from .trees import Branch, Leaf, Other, SpecialLeaf, nodes, trees


class Wrapper(Config):
    inner: Config | None = None
    factor: float = 1.0


class Strict(Config):
    leaf: Leaf = Leaf()
    needed: Leaf = Leaf()
    pair: tuple[Leaf, Leaf] = (Leaf(), Leaf())


class Layer(Configurable):
    class Config(Config):
        tags: tuple[str, ...] = ()
        inner: Config | None = None


ROOT = Branch(left=Leaf(value=1), items=(Leaf(value=2), Other(), SpecialLeaf()), table={"x": Leaf(), "yy": Other()})


def test_wrap_puts_each_node_into_the_wrapper():
    new = select(ROOT, Leaf).wrap(Wrapper(factor=2.0), "inner")
    assert new.left == Wrapper(inner=Leaf(value=1), factor=2.0)
    assert new.items == (Wrapper(inner=Leaf(value=2), factor=2.0), Other(), Wrapper(inner=SpecialLeaf(), factor=2.0))
    assert new.table["x"] == Wrapper(inner=Leaf(), factor=2.0)
    assert ROOT.left == Leaf(value=1)


def test_case_put_fills_the_innermost_slot_and_keeps_wrappers():
    wrapped = Wrapper(inner=Wrapper(inner=Leaf(value=1), factor=2.0))
    for root in (wrapped, Wrapper(inner=Wrapper(factor=2.0))):
        assert root.put(inner=Leaf(value=3)) == Wrapper(inner=Wrapper(inner=Leaf(value=3), factor=2.0))
    assert select(wrapped, "").put(inner=None) == Wrapper(inner=Wrapper(factor=2.0))
    assert select(Branch(left=Leaf()), "").put(left=Leaf(value=2)) == Branch(left=Leaf(value=2))
    with pytest.raises(ConfigError, match="Wrapper has no field 'outer'"):
        wrapped.put(outer=Leaf())


def test_wrap_works_on_the_root_and_on_nested_nodes():
    assert select(Leaf(), "").wrap(Wrapper(), "inner") == Wrapper(inner=Leaf())
    nested = Wrapper(inner=Wrapper(inner=Leaf()))
    new = select(nested, Wrapper, expect=2).wrap(Wrapper(factor=3.0), "inner")
    assert [path for path, _ in select(new, Wrapper)] == ["", "inner", "inner.inner", "inner.inner.inner"]


def test_wrap_into_a_missing_or_unsuitable_slot_names_the_path():
    with pytest.raises(ConfigError, match=r"at left: .*no field 'iner'. Did you mean 'inner'"):
        select(ROOT, "left").wrap(Wrapper(), "iner")
    with pytest.raises(ConfigError, match=r"at items.1: .*leaf must be Leaf"):
        select(ROOT, "items.1").wrap(Strict(), "leaf")
    with pytest.raises(ConfigError, match=r"at the root: .*leaf must be Leaf"):
        select(Strict(), "leaf").wrap(Wrapper(), "inner")


def test_remove_deletes_items_and_entries_and_empties_slots():
    new = select(ROOT, Leaf).remove()
    assert new == Branch(items=(Other(),), table={"yy": Other()})
    assert select(ROOT, "items.*").remove().items == ()
    assert select(ROOT, "table.*").remove().table == {}
    assert len(ROOT.items) == 3


def test_remove_from_a_required_slot_raises():
    with pytest.raises(ConfigError, match=r"at the root: .*Strict.needed must be Leaf, not None"):
        select(Strict(), "needed").remove()
    with pytest.raises(ConfigError, match=r"at left: .*Strict.pair must be"):
        select(Branch(left=Strict()), "left.pair.0").remove()


def test_remove_works_on_a_node_and_its_descendant():
    tree = Branch(left=Branch(left=Leaf(), right=Other()))
    assert select(tree, lambda path, _: path.startswith("left")).remove() == Branch()


@given(trees, st.data())
def test_remove_keeps_nodes_that_are_not_selected(tree, data):
    by_path = {segments: node for segments, node in nodes(tree).items() if segments}
    assume(by_path)
    segments = data.draw(st.sampled_from(list(by_path)))
    before = text(tree)
    new = select(tree, ".".join(segments)).remove()
    assert text(tree) == before
    below = sum(each[: len(segments)] == segments for each in nodes(tree))
    assert len(nodes(new)) == len(nodes(tree)) - below


@pytest.mark.parametrize(
    ("at", "expected"),
    [(None, "abXY"), (0, "XYab"), (1, "aXYb"), (2, "abXY"), (-1, "aXYb")],
)
def test_insert_adds_at_the_end_or_before_an_index(at, expected):
    tree = Branch(items=(Leaf(note="a"), Leaf(note="b")))
    new = select(tree, "").insert("items", Leaf(note="X"), Leaf(note="Y"), at=at)
    assert "".join(item.note for item in new.items) == expected
    assert len(tree.items) == 2


def test_insert_works_on_every_selected_node_and_requires_a_tuple():
    tree = Branch(left=Branch(), right=Branch(items=(Other(),)))
    new = select(tree, Branch).insert("items", Leaf())
    assert [len(node.items) for _, node in select(new, Branch)] == [1, 1, 2]
    with pytest.raises(ConfigError, match=r"at left: insert requires a tuple, but tag is str"):
        select(tree, "left").insert("tag", Leaf())
    with pytest.raises(ConfigError, match=r"at left: .*items must be"):
        select(tree, "left").insert("items", "no node")


def test_tagged_selects_by_tag():
    tree = Branch(
        left=Layer.Config(tags=("frozen", "a"), inner=Layer.Config(tags=("a",))), right=Layer.Config(), items=(Leaf(),)
    )
    assert select(tree, tagged("a")).paths == ("left", "left.inner")
    assert select(tree, tagged("frozen"), expect=1).paths == ("left",)
    with pytest.raises(ConfigError, match="nothing in the config matches"):
        select(tree, tagged("froz"))


@pytest.mark.parametrize("result", [None, 3, Leaf, (Leaf(),)], ids=repr)
def test_map_requires_a_config(result):
    with pytest.raises(ConfigError, match=r"at items.1: the edit returned .*, not a config"):
        select(ROOT, "items.1").map(lambda path, node: result)


def test_map_names_the_path_of_a_failing_or_misfitting_edit():
    with pytest.raises(ConfigError, match=r"at table.x: .*no field 'nothing'"):
        select(ROOT, "table.x").map(lambda path, node: node.set(nothing=1))
    with pytest.raises(ConfigError, match=r"at left: .*Strict.leaf must be Leaf"):
        select(Branch(left=Strict()), "left.leaf").map(lambda path, node: Other())


def test_other_exceptions_of_an_edit_propagate():
    with pytest.raises(ZeroDivisionError):
        select(ROOT, "left").map(lambda path, node: 1 / 0)


def test_expect_zero_raises_as_well():
    with pytest.raises(ConfigError, match="nothing in the config matches"):
        select(ROOT, "nowhere", expect=0)
