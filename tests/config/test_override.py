"""`path=value` overrides."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

from axcore.config import REQUIRED, AxcoreError, Config, ConfigError, Configurable, FrozenDict, override, register, text


class Inner(Config):
    width: int = 4
    rate: float = 0.5


class Values(Config):
    integer: int = 0
    number: float = 0.0
    flag: bool = False
    word: str = ""
    maybe: str | None = "x"
    maybe_int: int | None = 1
    maybe_number: float | None = None
    maybe_flag: bool | None = None
    either: int | str = 0
    mode: Literal["fast", "slow", "3"] = "fast"
    level: Literal[1, 2] = 1
    many: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    maybe_words: tuple[str, ...] | None = None
    pair: tuple[int, str] = (0, "")
    floats: tuple[float, float] = (0.0, 0.0)
    table: Mapping[str, int] = FrozenDict({"a": 1})
    anything: Any = None
    function: Callable[[int], int] = abs
    required: int = REQUIRED
    inner: Inner = Inner()
    empty: Inner | None = None
    full: Inner | None = Inner()
    nodes: tuple[Inner, ...] = (Inner(), Inner())


ROOT = Values()


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("integer=3", 3),
        ("integer=-3", -3),
        ("integer=1_000", 1000),
        ("integer = 3 ", 3),
        ("number=0.25", 0.25),
        ("number=1", 1.0),
        ("number=-1e-3", -0.001),
        ("number=inf", float("inf")),
        ("flag=true", True),
        ("flag=False", False),
        ("flag=TRUE", True),
        ("word=hello", "hello"),
        ("word=3", "3"),
        ("word=None", "None"),
        ("word=true", "true"),
        ("word=a=b", "a=b"),
        ("word=", ""),
        ("word='quoted'", "quoted"),
        ("word=(1, 2)", "(1, 2)"),
        ("maybe=none", None),
        ("maybe=null", None),
        ("maybe=None", None),
        ("maybe=y", "y"),
        ("maybe_int=None", None),
        ("maybe_int=5", 5),
        ("maybe_number=2", 2.0),
        ("maybe_flag=true", True),
        ("maybe_flag=none", None),
        ("either=3", 3),
        ("either=three", "three"),
        ("mode=slow", "slow"),
        ("mode='slow'", "slow"),
        ("mode=3", "3"),
        ("level=2", 2),
        ("many=1,2,3", (1, 2, 3)),
        ("many=(1, 2)", (1, 2)),
        ("many=[1, 2]", (1, 2)),
        ("many=5", (5,)),
        ("many=()", ()),
        ("numbers=1,2.5", (1.0, 2.5)),
        ("words=a,b", ("a", "b")),
        ("words=a", ("a",)),
        ("words=1,2", ("1", "2")),
        ("words=('a b', 'c')", ("a b", "c")),
        ("maybe_words=a,b", ("a", "b")),
        ("maybe_words=none", None),
        ("pair=(1, 'a')", (1, "a")),
        ("floats=1,2", (1.0, 2.0)),
        ("table={'b': 2}", {"b": 2}),
        ("anything=3", 3),
        ("anything=word", "word"),
        ("required=7", 7),
        ("inner.width=9", 9),
        ("nodes.1.rate=1", 1.0),
        ("full=none", None),
    ],
)
def test_a_value_is_parsed_by_the_annotation_of_its_field(assignment, expected):
    path = assignment.partition("=")[0].strip()
    value = override(ROOT, [assignment])
    for name in path.split("."):
        value = value[int(name)] if name.isdecimal() else getattr(value, name)
    assert value == expected
    assert type(value) is type(expected) or isinstance(expected, dict)
    if isinstance(expected, tuple):
        assert list(map(type, value)) == list(map(type, expected))


@pytest.mark.parametrize(
    ("assignment", "wanted"),
    [
        ("integer=1.5", "int"),
        ("integer=x", "int"),
        ("integer=true", "int"),
        ("integer=None", "int"),
        ("integer=", "int"),
        ("number=fast", "float"),
        ("flag=1", "bool"),
        ("flag=yes", "bool"),
        ("maybe_int=x", "int or None"),
        ("mode=medium", "one of 'fast', 'slow', '3'"),
        ("level=3", "one of 1, 2"),
        ("many=1,x", "tuple[int, ...]"),
        ("pair=1", "tuple[int, str]"),
        ("table=3", "Mapping[str, int]"),
        ("table={'a': 'b'}", "Mapping[str, int]"),
        ("function=nothing", "Callable"),
        ("inner.width=wide", "int"),
    ],
)
def test_a_value_of_the_wrong_type_names_path_type_and_value(assignment, wanted):
    path, _, value = assignment.partition("=")
    with pytest.raises(ConfigError) as error:
        override(ROOT, [assignment])
    assert f"{path} must be " in str(error.value)
    assert wanted in str(error.value)
    assert f"not {value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("path", "suggestion"), [("integr", "integer"), ("inner.widht", "inner.width"), ("innr.width", "inner.width")]
)
def test_an_unknown_path_suggests_the_nearest(path, suggestion):
    with pytest.raises(ConfigError) as error:
        override(ROOT, [f"{path}=1"])
    assert f"no {path!r}" in str(error.value)
    assert f"Did you mean {suggestion!r}?" in str(error.value)


@pytest.mark.parametrize("assignment", ["integer", "", "=3", "integer:3"])
def test_an_override_that_is_not_an_assignment_raises(assignment):
    with pytest.raises(AxcoreError, match="path=value"):
        override(ROOT, [assignment])


@pytest.mark.parametrize("path", [" ", ".", "integer.", ".integer", "integer.x", "nodes.2.width"])
def test_a_path_that_does_not_exist_raises(path):
    with pytest.raises(AxcoreError):
        override(ROOT, [f"{path}=3"])


@pytest.mark.parametrize("assignment", ["inner=3", "inner=Inner", "full=3", "empty=Inner", "nodes.0=1"])
def test_overriding_a_node_raises_and_points_to_its_fields(assignment):
    path = assignment.partition("=")[0]
    with pytest.raises(ConfigError) as error:
        override(ROOT, [assignment])
    assert path in str(error.value)
    if "." not in path:
        assert f"{path}.FIELD=VALUE" in str(error.value)
        assert "Inner" in str(error.value)


def test_a_required_node_cannot_be_set_to_none():
    with pytest.raises(ConfigError, match=r"inner must be Inner, not 'none'"):
        override(ROOT, ["inner=none"])


def test_one_entry_of_a_mapping_can_be_set_or_added():
    assert override(ROOT, ["table.a=2"]).table == {"a": 2}
    assert override(ROOT, ["table.b=3"]).table == {"a": 1, "b": 3}
    with pytest.raises(ConfigError, match=r"table\.a must be int, not 'x'"):
        override(ROOT, ["table.a=x"])


def test_one_item_of_a_tuple_can_be_set_but_not_added():
    cfg = ROOT.set(many=(1, 2), pair=(1, "a"))
    assert override(cfg, ["many.1=5"]).many == (1, 5)
    assert override(cfg, ["pair.1=5"]).pair == (1, "5")
    with pytest.raises(ConfigError, match=r"many\.0 must be int, not 'x'"):
        override(cfg, ["many.0=x"])
    for path in ("many.2", "many.-1", "many.x"):
        with pytest.raises(ConfigError, match=f"no {path!r}"):
            override(cfg, [f"{path}=1"])


def test_setting_one_item_keeps_items_that_are_none():
    class Axes(Config):
        axes: tuple[str | None, ...] = ("embed", None, "mlp")
        rules: Mapping[str, str | None] = FrozenDict({"embed": "fsdp", "mlp": None})

    assert override(Axes(), ["axes.0=vocab"]).axes == ("vocab", None, "mlp")
    assert override(Axes(), ["rules.embed=data"]).rules == {"embed": "data", "mlp": None}


def test_an_item_can_be_set_to_none():
    class Axes(Config):
        axes: tuple[str | None, ...] = ("embed", "mlp")
        rules: Mapping[str, str | None] = FrozenDict({"embed": "fsdp"})

    assert override(Axes(), ["axes.0=none"]).axes == (None, "mlp")
    assert override(Axes(), ["rules.embed=none"]).rules == {"embed": None}


def test_assignments_apply_in_order_to_a_copy():
    before = text(ROOT)
    new = override(ROOT, ["integer=1", "inner.width=2", "integer=3"])
    assert (new.integer, new.inner.width) == (3, 2)
    assert text(ROOT) == before
    assert override(ROOT, []) is ROOT


class Widths(Config):
    low: int | None = None
    high: int | None = None


class Built(Configurable):
    class Config(Config):
        width: int = 1


def quartered(x):
    return x / 4


def thirded(x):
    return x / 3


class Slots(Config):
    widths: Widths | None = None
    child: Built.Config | None = None
    activation: Callable[[int], int] = register(quartered, "first.quartered")
    other: Callable[[int], int] | None = None


def test_case_an_empty_field_of_one_plain_value_is_filled():
    cfg = override(Slots(), ["widths.low=3", "widths.high=4"])
    assert cfg.widths == Widths(low=3, high=4)
    with pytest.raises(ConfigError, match=r"no 'child\.width'"):
        override(Slots(), ["child.width=3"])  # any subclass of Built may fill the slot


def test_case_a_registered_function_is_set_by_its_name():
    register(thirded, "second.thirded")
    assert override(Slots(), ["activation=second.thirded"]).activation is thirded
    assert override(Slots(), ["other=quartered"]).other is quartered
    assert override(Slots(other=abs), ["other=none"]).other is None
    with pytest.raises(
        ConfigError, match=r"activation must be Callable.*, not 'quarters': .* Did you mean 'quartered'\?"
    ):
        override(Slots(), ["activation=quarters"])


@pytest.mark.parametrize("name", ["set", "text", "target", "diff", "history", "build", "fill", "layout_fields", "self"])
def test_case_a_field_cannot_have_the_name_of_an_attribute(name):
    with pytest.raises(ConfigError, match=f"cannot have a field '{name}'.* Rename the field"):
        type("Hidden", (Config,), {"__module__": __name__, "__annotations__": {name: int}, name: 3})
