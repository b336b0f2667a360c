"""The edit history of config nodes."""

import inspect
import re

import pytest

import axcore as ax
from axcore.config import Config, ConfigError, Modifier, acting, override, pipe, select, text
from axcore.plugin import recipe

from .trees import Branch, Leaf, Other

ATTENTION = "model.decoder.layers.attention"


def line():
    """`file:line` of the caller."""
    frame = inspect.currentframe().f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def shown(cfg, path=""):
    return str(cfg.history(path)).splitlines()


def test_a_node_records_where_it_was_made():
    cfg, where = Leaf(value=3), line()
    assert shown(cfg) == [f"python: made ({where})"]


def test_history_lists_the_edits_of_a_value_in_order():
    cfg = Leaf()
    assert str(cfg.history("value")) == "as declared"
    cfg, first = cfg.set(value=1), line()
    cfg = cfg.set(note="x")
    cfg, last = cfg.set(value=2), line()
    assert shown(cfg, "value") == [f"python: set value ({first})", f"python: set value ({last})"]
    assert len(cfg.history()) == 4


def test_modifiers_and_actors_nest_outermost_first():
    def deeper(cfg):
        return Modifier("inner", lambda cfg: select(cfg, Leaf).set(value=7), {"n": 1})(cfg)

    cfg = pipe(Branch(left=Leaf()), Modifier("outer", deeper))
    assert cfg.history("left")[-1].actor == "outer() > inner(n=1)"
    assert cfg.history("left")[-1].where.startswith(__file__)
    with acting("me"):
        cfg = cfg.set(tag="a")
    assert [each.actor for each in cfg.history("tag")] == ["me"]
    assert cfg.set(tag="b").history("tag")[-1].actor == "python"


def test_the_actor_is_reset_after_an_exception():
    def fail(cfg):
        raise ValueError

    with pytest.raises(ValueError):
        Modifier("bad", fail)(Leaf())
    assert Leaf(value=1).history()[-1].actor == "python"


def test_recipes_features_and_overrides_are_recorded_as_actors(tiny_on_path, fresh_registry):
    base = recipe("tiny")
    cfg = override(ax.use("rope", theta=3e4)(base), [f"{ATTENTION}.num_heads=4"])
    assert all(event.actor == "recipe tiny" for event in base.history(ATTENTION))
    position = shown(cfg, f"{ATTENTION}.position")
    assert all(re.match(r"use:rope of axcore-rope \S+\(theta=30000.0\): ", each) for each in position)
    assert "feature.py:" in position[0]
    (heads,) = cfg.history(f"{ATTENTION}.num_heads")[1:]
    assert heads.actor == f"--set {ATTENTION}.num_heads=4" and heads.action == "set num_heads"
    assert heads.where.startswith(__file__)


def test_a_swap_records_the_replaced_type_and_its_actor():
    cfg = Branch(left=Leaf(), right=Leaf())
    cfg, where = select(cfg, "left").swap(Other()), line()
    *_, last = shown(cfg, "left")
    assert last == f"python: in place of tests.config.trees.Leaf ({where})"
    assert "in place of" not in str(cfg.history("right"))


def test_events_are_ordered_oldest_first():
    child = Leaf()
    cfg = Branch(left=child)
    cfg = select(cfg, Leaf).set(value=3)
    cfg = cfg.set(left=cfg.left.set(note="x"))
    actions = [(each.action, int(each.where.rpartition(":")[2])) for each in cfg.history("left")]
    assert [number for _, number in actions] == sorted(number for _, number in actions)
    assert [action for action, _ in actions] == ["made", "made", "set value", "set note", "set left"]


def test_edits_of_ancestors_and_siblings_are_excluded():
    cfg = Branch(left=Branch(left=Leaf(), right=Leaf()))
    before = {path: shown(cfg, path) for path in ("", "left", "left.right", "left.tag")}
    with acting("culprit"):
        for changed in (select(cfg, "left.left").set(value=5), override(cfg, ["left.left.value=5"])):
            assert {path: shown(changed, path) for path in before} == before
            assert "culprit" in str(changed.history("left.left"))


def test_edits_do_not_change_the_old_tree():
    cfg = Branch(left=Leaf(), items=(Leaf(), Other()))
    before, told = text(cfg), {path: shown(cfg, path) for path in ("", "left", "items.0", "items")}
    select(cfg, Leaf).set(value=9)
    select(cfg, "left").swap(Other())
    select(cfg, "items.1").remove()
    override(cfg, ["left.value=4"])
    cfg.set(tag="b")
    assert text(cfg) == before
    assert {path: shown(cfg, path) for path in told} == told


def test_equality_and_text_ignore_history():
    assert Leaf().set(value=1).set(value=0) == Leaf()
    assert text(Leaf().set(value=1).set(value=0)) == text(Leaf())
    assert hash(Leaf().set(value=1).set(value=0)) == hash(Leaf())


def test_history_of_an_unknown_path_raises():
    with pytest.raises(ConfigError, match=r"no 'lefd'.*Did you mean 'left'"):
        Branch(left=Leaf()).history("lefd")


def test_the_recorded_line_is_outside_the_config_package():
    class Holder(Config):
        leaf: Leaf = Leaf()

    cfg = select(Holder(), Leaf).map(lambda _, node: node.set(value=2))
    assert cfg.history("leaf")[-1].where.startswith(__file__)
    assert all("/axcore/config/" not in event.where for event in cfg.history("leaf"))
