"""Config classes and random trees of them."""

from collections.abc import Mapping

from hypothesis import strategies as st

from axcore.config import Config, FrozenDict


class Leaf(Config):
    value: int = 0
    note: str = ""


class SpecialLeaf(Leaf):
    extra: float = 0.5


class Other(Config):
    value: int = 7


class Branch(Config):
    tag: str = ""
    left: Config | None = None
    right: Config | None = None
    items: tuple[Config, ...] = ()
    table: Mapping[str, Config] = FrozenDict()


leaves = st.one_of(
    st.builds(Leaf, value=st.integers(-3, 3), note=st.text(max_size=3)),
    st.builds(SpecialLeaf, value=st.integers(-3, 3)),
    st.builds(Other, value=st.integers(-3, 3)),
)


def _branches(below):
    return st.builds(
        Branch,
        tag=st.sampled_from(["", "a", "b"]),
        left=st.none() | below,
        right=st.none() | below,
        items=st.lists(below, max_size=2),
        table=st.dictionaries(st.sampled_from(["x", "yy", "left"]), below, max_size=2),
    )


trees = st.recursive(leaves, _branches, max_leaves=6)


def below(value):
    """(segment, part) of each direct part of a value. The reference for the code under test."""
    if isinstance(value, Branch):
        return [(name, getattr(value, name)) for name in ("tag", "left", "right", "items", "table")]
    if isinstance(value, Config):
        names = {Leaf: ("value", "note"), SpecialLeaf: ("value", "note", "extra"), Other: ("value",)}[type(value)]
        return [(name, getattr(value, name)) for name in names]
    if isinstance(value, tuple):
        return [(str(index), item) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return [(key, value[key]) for key in value]
    return []


def nodes(value, segments=()):
    """Every node by its path segments."""
    found = {segments: value} if isinstance(value, Config) else {}
    for name, part in below(value):
        found.update(nodes(part, (*segments, name)))
    return found


def replaced(value, segments, new):
    """A copy with `new` at the segments, made only with constructors."""
    if not segments:
        return new
    name, *rest = segments
    parts = {key: replaced(part, rest, new) if key == name else part for key, part in below(value)}
    if isinstance(value, Config):
        return type(value)(**parts)
    return tuple(parts.values()) if isinstance(value, tuple) else parts
