"""Config nodes: immutability, types, keyword-only fields and building."""

import copy
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

from axcore.config import (
    REQUIRED,
    AxcoreError,
    Config,
    ConfigError,
    Configurable,
    FrozenDict,
    has_field,
    known_types,
    shown_type,
    type_name,
)


class Norm(Config):
    eps: float = 1e-5


class Engine(Configurable):
    class Config(Config):
        """The config of an engine."""

        width: int = REQUIRED
        depth: int = 2
        norm: Norm = Norm()

    def __init__(self, cfg: Any, extra: str = ""):
        self.cfg, self.extra = cfg, extra


class Turbo(Engine):
    pass


class Racing(Engine):
    class Config(Engine.Config):
        depth: int = 9
        boost: float = 1.5


class Everything(Config):
    integer: int = 0
    number: float = 0.0
    flag: bool = False
    word: str = ""
    maybe: str | None = None
    mode: Literal["fast", "slow"] = "fast"
    pair: tuple[int, str] = (0, "")
    many: tuple[float, ...] = ()
    table: Mapping[str, int] = FrozenDict()
    loose_table: Mapping[str, Any] = FrozenDict()
    anything: Any = None
    function: Callable[[int], int] = abs
    kind: type[Norm] = Norm
    node: Norm | None = None
    nodes: tuple[Norm, ...] = ()


def module_function(x: int) -> int:
    return x


def test_fields_cannot_be_assigned_or_deleted():
    cfg = Norm()
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.eps = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        del cfg.eps
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.brand_new = 1
    assert cfg == Norm(eps=1e-5)


def test_positional_arguments_raise():
    with pytest.raises(ConfigError, match=r"Norm takes its fields by name"):
        Norm(1e-5)


@pytest.mark.parametrize("make", [lambda: Norm(epz=1.0), lambda: Norm().set(epz=1.0), lambda: Norm().fill(epz=1.0)])
def test_a_misspelt_field_raises_and_suggests_the_name(make):
    with pytest.raises(ConfigError, match=r"Norm has no field 'epz'\. Did you mean 'eps'\?"):
        make()


def test_a_misspelt_attribute_suggests_the_name():
    with pytest.raises(AttributeError, match=r"no field 'epz'\. Did you mean 'eps'\?"):
        _ = Norm().epz


def test_a_missing_field_without_default_raises_at_build():
    class Window(Config):
        size: int

    try:
        cfg = Window()
    except AxcoreError as error:
        assert "size" in str(error)
    else:
        assert cfg.size is REQUIRED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("integer", 1.0),
        ("integer", "1"),
        ("integer", True),
        ("integer", None),
        ("number", "0.1"),
        ("number", True),
        ("flag", 1),
        ("word", 3),
        ("word", None),
        ("maybe", 3),
        ("mode", "medium"),
        ("mode", None),
        ("pair", (1, 2)),
        ("pair", (1, "a", 2)),
        ("pair", 1),
        ("many", (1.0, "a")),
        ("many", 1.0),
        ("table", {"a": "b"}),
        ("table", [1]),
        ("function", 3),
        ("kind", 3),
        ("node", 3),
        ("node", Engine.Config()),
        ("nodes", (Norm(), 1)),
        ("nodes", Norm()),
    ],
)
def test_a_value_of_the_wrong_type_raises_and_names_field_and_value(field, value):
    with pytest.raises(ConfigError) as in_constructor:
        Everything(**{field: value})
    with pytest.raises(ConfigError) as in_set:
        Everything().set(**{field: value})
    for error in (in_constructor, in_set):
        assert f"Everything.{field} must be" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("integer", -3),
        ("number", 2),
        ("number", float("inf")),
        ("flag", True),
        ("maybe", "x"),
        ("maybe", None),
        ("mode", "slow"),
        ("pair", (1, "a")),
        ("many", (1, 2.5)),
        ("table", {"a": 1}),
        ("loose_table", {"a": 1, "b": "x"}),
        ("anything", object),
        ("anything", 3),
        ("anything", None),
        ("function", module_function),
        ("kind", Norm),
        ("node", Norm(eps=1.0)),
        ("nodes", (Norm(), Norm(eps=1.0))),
        ("integer", REQUIRED),
    ],
)
def test_a_value_of_the_right_type_is_accepted(field, value):
    assert getattr(Everything(**{field: value}), field) == value
    assert getattr(Everything().set(**{field: value}), field) == value


def test_the_error_of_a_literal_lists_the_choices():
    with pytest.raises(ConfigError, match=r"one of 'fast', 'slow'"):
        Everything(mode="medium")


def test_defaults_are_checked_like_given_values():
    with pytest.raises(ConfigError, match="size"):

        class Wrong(Config):
            size: int = "three"

        Wrong()


def test_the_value_of_a_default_factory_is_frozen():
    class Lists(Config):
        items: tuple[int, ...] = dataclasses.field(default_factory=list)

    assert Lists().items == ()
    hash(Lists())


def test_overriding_a_default_without_an_annotation_raises():
    try:

        class Wide(Norm):
            eps = 0.5

        assert Wide().eps == 0.5
    except (ConfigError, TypeError) as error:
        assert "eps" in str(error)


def test_required_is_one_object_and_cannot_be_used_as_a_truth_value():
    cfg = Engine.Config()
    assert cfg.width is REQUIRED
    assert repr(REQUIRED) == "REQUIRED"
    assert pickle.loads(pickle.dumps(REQUIRED)) is REQUIRED
    assert copy.deepcopy(REQUIRED) is REQUIRED
    with pytest.raises(ConfigError, match="REQUIRED"):
        bool(cfg.width)


def test_build_names_the_fields_that_are_still_required():
    with pytest.raises(ConfigError, match=r"width is REQUIRED \(.*Engine\) but not set\. Pass width=\.\.\. to"):
        Engine.Config().build()


def test_build_instantiates_the_enclosing_class():
    built = Engine.Config(width=3).build("x")
    assert type(built) is Engine
    assert built.cfg.width == 3
    assert built.extra == "x"


def test_building_a_plain_value_raises():
    with pytest.raises(ConfigError, match="plain value"):
        Norm().build()


def test_a_subclass_without_a_config_gets_its_own_with_the_same_fields():
    assert Turbo.Config is not Engine.Config
    assert issubclass(Turbo.Config, Engine.Config)
    assert type(Turbo.Config(width=1).build()) is Turbo
    assert type(Engine.Config(width=1).build()) is Engine
    assert type_name(Turbo.Config).endswith(".Turbo")
    assert Turbo.Config.__doc__ == Engine.Config.__doc__


def test_a_subclass_config_inherits_fields_and_overrides_defaults():
    cfg = Racing.Config(width=1)
    assert (cfg.width, cfg.depth, cfg.boost) == (1, 9, 1.5)
    assert type(cfg.build()) is Racing
    with pytest.raises(ConfigError, match=r"Racing\.depth must be int"):
        Racing.Config(depth="deep")


def test_a_nested_config_must_be_a_config():
    with pytest.raises(TypeError, match="must inherit"):

        class Wrong(Configurable):
            class Config:
                pass


def test_has_field_includes_inherited_fields():
    assert has_field(Racing.Config(), "width")
    assert not has_field(Engine.Config(), "boost")
    assert not has_field(Engine.Config(), "build")


def test_set_returns_a_copy_that_shares_unchanged_fields():
    old = Engine.Config(width=1)
    new = old.set(depth=5)
    assert (old.depth, new.depth) == (2, 5)
    assert new.norm is old.norm
    assert type(new) is type(old)


def test_set_runs_post_init():
    class Canonical(Config):
        word: str = "a"

        def __post_init__(self):
            object.__setattr__(self, "word", self.word.upper())

    assert Canonical(word="b").word == "B"
    assert Canonical().set(word="b") == Canonical(word="b")


def test_fill_sets_required_and_none_fields_and_accepts_equal_values():
    assert Engine.Config().fill(width=4).width == 4
    assert Everything().fill(maybe="x").maybe == "x"
    assert Engine.Config(width=4).fill(width=4).width == 4


def test_fill_of_a_field_with_another_value_raises():
    with pytest.raises(ConfigError, match=r"width=3 is set on .*Engine.*parent passes width=4"):
        Engine.Config(width=3).fill(width=4)


def test_equality_needs_the_same_type_and_values():
    assert Engine.Config(width=1) == Engine.Config(width=1)
    assert Engine.Config(width=1) != Engine.Config(width=2)
    assert Engine.Config(width=1) != Turbo.Config(width=1)


def test_equal_configs_hash_alike():
    one = Everything(table={"a": 1, "b": 2}, many=[1, 2], node=Norm())
    two = Everything(many=(1, 2), node=Norm(), table={"a": 1, "b": 2})
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two}) == 1


def test_the_hash_ignores_key_order():
    one, two = Everything(table={"a": 1, "b": 2}), Everything(table={"b": 2, "a": 1})
    assert one != two or hash(one) == hash(two)


def test_lists_and_dicts_are_frozen_when_stored():
    source_list, source_dict = [1.0, 2.0], {"a": 1}
    cfg = Everything(many=source_list, table=source_dict)
    source_list.append(3.0)
    source_dict["b"] = 2
    assert cfg.many == (1.0, 2.0)
    assert dict(cfg.table) == {"a": 1}
    with pytest.raises(TypeError):
        cfg.table["a"] = 2


def test_nested_lists_and_dicts_are_frozen_too():
    inner_list, inner_dict = [1], {"b": 1}
    cfg = Everything(anything=[inner_list, {"x": inner_list}], loose_table={"a": inner_dict, "l": inner_list})
    inner_list.append(2)
    inner_dict["b"] = 2
    assert cfg.anything[0] == (1,)
    assert cfg.anything[1]["x"] == (1,)
    assert cfg.loose_table["a"]["b"] == 1
    assert cfg.loose_table["l"] == (1,)
    hash(cfg)


@pytest.mark.parametrize(
    "cfg",
    [
        Engine.Config(),
        Racing.Config(width=3, norm=Norm(eps=0.1)),
        Everything(table={"a": 1}, nodes=(Norm(),), function=module_function),
    ],
    ids=lambda cfg: type_name(type(cfg)).rpartition(".")[2],
)
def test_pickle_and_deepcopy_return_an_equal_config(cfg):
    for again in (pickle.loads(pickle.dumps(cfg)), copy.deepcopy(cfg), copy.copy(cfg)):
        assert again == cfg
        assert type(again) is type(cfg)
        with pytest.raises(dataclasses.FrozenInstanceError):
            again.anything = 1
    assert pickle.loads(pickle.dumps(Engine.Config())).width is REQUIRED


def test_repr_shows_the_class_and_non_default_fields():
    assert repr(Engine.Config(width=3)) == "Engine(width=3)"
    assert repr(Norm()) == "Norm()"


def test_an_annotation_for_type_checkers_only_accepts_every_value():
    class Lazy(Config):
        thing: "NotImportedHere" = None  # noqa: F821
        size: int = 1

    assert Lazy(thing=3).thing == 3
    with pytest.raises(ConfigError):
        Lazy(size="x")


def test_messages_name_the_package_that_exports_a_class():
    import axcore.infer
    import axcore.nn
    import axcore.train

    infer = axcore.infer
    with pytest.raises(ConfigError, match=r"^axcore\.infer\.Engine\.max_len must be at least 1, not 0"):
        infer.Engine.Config(max_len=0)
    with pytest.raises(ConfigError, match=r"^axcore\.infer\.Engine has no field 'rows'"):
        infer.Engine.Config(rows=1)
    with pytest.raises(ConfigError, match=r"max_len is REQUIRED \(axcore\.infer\.Engine\)"):
        infer.Engine.Config().build(None)
    for package in (infer, axcore.nn, axcore.train):
        exported = {getattr(package, name) for name in package.__all__}
        for cls in known_types().values():
            if cls.target in exported and cls.__qualname__ == f"{cls.target.__qualname__}.Config":
                shown = shown_type(cls)
                assert shown.count(".") <= package.__name__.count(".") + 1, shown
    assert type_name(infer.Engine.Config) == "axcore.infer.engine.engine.Engine"  # what JSON refers to
    assert shown_type(Engine.Config) == type_name(Engine.Config)  # no package exports it
