"""`Config`, the base of every config node: a frozen, typed, keyword-only dataclass that builds its target class."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from axcore.config.codec import (
    Codec,
    digest,
    name_of,
    named,
    public_name,
    register,
    register_codec,
    same,
    shown,
)
from axcore.config.errors import ConfigError, MissingError, did_you_mean
from axcore.config.frozen import MAX_DEPTH, Node, depth_of, frozen
from axcore.config.history import Event, History, event
from axcore.config.types import cached, conforms, hints, required, widened

if TYPE_CHECKING:
    from axcore.config.text import Diff


class _Required:
    """The type of REQUIRED, the value of a field that the parent or the user must set."""

    def __repr__(self) -> str:
        return "REQUIRED"

    def __reduce__(self) -> str:
        return "REQUIRED"  # unpickling returns the same object

    def __bool__(self) -> bool:
        raise ConfigError("a field that is still REQUIRED was used as a value; set it first")


REQUIRED: Any = _Required()  # Any: a default of fields of every type
register_codec(_Required, Codec("required", lambda _: None, lambda _: REQUIRED, repr))

_types: dict[str, type[Config]] = {}


def known_types() -> Mapping[str, type[Config]]:
    """Every config class of this process, by its name in text and JSON."""
    return _types


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
class Config(Node):
    """Base of every config node. A subclass declares typed fields.

    ```python
    class Config(ax.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        norm: RMSNorm.Config = RMSNorm.Config()
    ```

    Nodes are immutable: `set` returns a new node, and `axcore.select` edits whole trees. A config class nested in a
    `Configurable` class builds that class. Any other config is a plain value, such as a mask or an initializer.

    Raises:
        ConfigError: A field is unknown, or a value does not fit the annotation of its field.
    """

    target: ClassVar[Any] = None  # Any: each config class has its own target
    """The class that `build` instantiates, or None for a plain value."""

    layout_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of this class that do not change the result of a run, such as a mesh, a kernel or rematerialization. A
    resumed run may change these fields and everything below them. If a class that fills such a field affects the
    result, as a kernel that wraps another may, it lists its own layout fields; its other fields must not change."""

    keeps_slot: ClassVar[bool] = False
    """Whether `put` leaves nodes of this class in their slot, because the node above does not work without them."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        own = inspect.get_annotations(cls)
        for name, hint in own.items():
            hidden = name in ("self", "_history", "_hash", "_depth") or any(
                name in base.__dict__ and name not in getattr(base, "__dataclass_fields__", ())
                for base in cls.__mro__[1:]
            )
            if hidden and "ClassVar" not in str(hint):
                raise ConfigError(
                    f"{shown_type(cls)} cannot have a field {name!r}, because configs use that name themselves. "
                    f"Rename the field"
                )
        for name in own:
            if name not in cls.__dict__ and "ClassVar" not in str(own[name]):
                setattr(cls, name, REQUIRED)  # a field without a default must be set
        for name in set(cls.__dict__) & set(getattr(cls, "__dataclass_fields__", ())) - set(own):
            raise ConfigError(
                f"{shown_type(cls)}.{name} overrides a field without an annotation. Repeat it, as in "
                f"`{name}: int = ...`"
            )
        dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)(cls)
        init = cls.__init__

        @functools.wraps(init)
        def checked_init(self: Config, *args: object, **values: object) -> None:
            if args:
                raise ConfigError(f"{shown_type(type(self))} takes its fields by name, not by position")
            for name in values:
                _check_known(type(self), name)
            given = {name: _store(type(self), name, value) for name, value in values.items()}
            init(self, **{name: default(type(self), name) for name in field_names(type(self))} | given)
            self.__dict__["_history"] = (event("made", *values),)
            _measure(self)

        _types[type_name(cls)] = cls
        for name in field_names(cls):
            value = cls.__dataclass_fields__[name].default
            if inspect.isroutine(value) or isinstance(value, type | enum.Enum):
                register(value)  # so that JSON can refer to it
        cls.__init__ = checked_init  # type: ignore[assignment, method-assign]

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    else:  # hidden from type checkers, which would otherwise accept every field name

        def __getattr__(self, name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            known = [field.name for field in dataclasses.fields(self)]
            raise AttributeError(f"{shown_type(type(self))} has no field {name!r}.{did_you_mean(name, known)}")

    def set(self, **values: object) -> Self:
        """A copy with these fields replaced."""
        for name in values:
            _check_known(type(self), name)
        return self._with(values, event(f"set {', '.join(values)}", *values))

    def put(self, **slots: Config | None) -> Self:
        """A copy with these slots filled, like `set`, but wrappers stay: if a slot holds a node with a slot of the same
        name, the innermost slot of that name is set. Nodes that keep their slot stay, too. None empties a slot."""

        def filled(name: str, new: Config | None) -> Config | None:
            held = self.__dict__.get(name)
            if isinstance(held, Config) and has_field(held, name):
                return held.put(**{name: new})
            return held if isinstance(held, Config) and held.keeps_slot else new

        return self.set(**{name: filled(name, new) for name, new in slots.items()})

    def _with(self, values: Mapping[str, object], *events: Event) -> Self:
        """A copy with existing fields replaced and `events` appended to its history."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.__dict__.update({name: _store(type(self), name, value) for name, value in values.items()})
        new.__dict__["_history"] = (*self.__dict__.get("_history", ()), *events)
        new.__dict__.pop("_hash", None)
        getattr(type(new), "__post_init__", lambda _: None)(new)
        _measure(new)
        return new

    def fill(self, **values: object) -> Self:
        """A copy with values that the parent node provides.

        Raises:
            ConfigError: A field is unknown, or already set to another value.
        """
        for name, value in values.items():
            _check_known(type(self), name)
            held = getattr(self, name)
            if held is not REQUIRED and held is not None and not same(held, _store(type(self), name, value)):
                raise ConfigError(
                    f"{name}={shown(held)} is set on {shown_type(type(self))}, but its parent passes "
                    f"{name}={shown(value)}; leave it unset in the child"
                )
        return self._with(values)

    def build(self, *args: object, **kwargs: object) -> Any:  # Any: an instance of the target
        """Builds the target from this config. Extra arguments go to its constructor.

        Raises:
            ConfigError: A field is still REQUIRED, or the node is a plain value.
        """
        if self.target is None:
            raise ConfigError(f"{shown_type(type(self))} is a plain value and cannot be built")
        missing = [name for name, value in fields(self) if value is REQUIRED]
        if missing:
            raise MissingError(missing, shown_type(type(self)))
        return self.target(self, *args, **kwargs)

    def text(self) -> str:
        """The tree as text, one line per value, in a stable order."""
        from axcore.config.text import text

        return text(self)

    def diff(self, base: Config) -> Diff:
        """What changed from `base` to this config."""
        from axcore.config.text import diff

        return diff(base, self)

    def history(self, path: str = "") -> History:
        """The edits of the node or value at a path, oldest first: who made each, and on which line.

        Raises:
            ConfigError: The path does not exist.
        """
        from axcore.config.tree import history

        return history(self, path)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self is other or all(same(value, other.__dict__[name]) for name, value in fields(self))

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self.__dict__["_hash"] = hash((type(self), *(digest(value) for _, value in fields(self))))
        return int(self.__dict__["_hash"])

    def __getstate__(self) -> dict[str, object]:
        """Pickles a function by its registered name, because its qualified name may be private. For example,
        `jax.nn.silu` is `jax._src.nn.functions.silu`."""
        state: dict[str, object] = dict(self.__dict__)
        state.pop("_hash", None)  # hashes of text differ between processes
        for name, value in fields(self):
            if inspect.isroutine(value) or (callable(value) and hasattr(value, "__qualname__")):
                known = name_of(value)
                state[name] = _ByName(known) if known != public_name(value) else value
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        for name, value in state.items():
            if isinstance(value, _ByName):
                self.__dict__[name] = named(value.name)

    def __repr__(self) -> str:
        given = (f"{name}={shown(value)}" for name, value in fields(self) if value is not default(type(self), name))
        return f"{type_name(type(self)).rpartition('.')[2]}({', '.join(given)})"


@dataclasses.dataclass(frozen=True)
class _ByName:
    """The pickled form of a registered value."""

    name: str


class Configurable:
    """Base of a class that is built from its nested `Config`, as `cls(cfg, ...)`.

    A subclass that declares no `Config` gets one that inherits the fields of its parent's `Config`. The type of a node
    therefore always identifies the class that it builds.
    """

    if TYPE_CHECKING:
        Config: type[Any]  # Any: each subclass has its own

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        node: type[Config] | None = cls.__dict__.get("Config")
        if node is None:
            inherited = getattr(cls, "Config", Config)
            names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
            node = type("Config", (inherited,), {**names, "__doc__": inherited.__doc__})
            cls.Config = node
        if not issubclass(node, Config):
            raise TypeError(f"{cls.__qualname__}.Config must inherit axcore.Config or a parent's Config")
        node.target = cls


def fields(node: Config) -> Iterator[tuple[str, Any]]:  # Any: the type depends on the field
    """(name, value) of each field, in declaration order."""
    values = node.__dict__
    return ((name, values[name]) for name in field_names(type(node)))


@cached
def field_names(cls: type[Config]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def has_field(node: Config, name: str) -> bool:
    return name in type(node).__dataclass_fields__


@cached
def default(cls: type[Config], name: str) -> object:
    """The declared default of a field in the form that a node stores, or REQUIRED if there is none."""
    field = cls.__dataclass_fields__[name]
    if field.default_factory is not dataclasses.MISSING:
        return _store(cls, name, field.default_factory())
    return REQUIRED if field.default is dataclasses.MISSING else _store(cls, name, field.default)


def type_name(cls: type) -> str:
    """The name of a node's type in text and JSON: the module and qualified name of the class that it builds."""
    return f"{cls.__module__}.{cls.__qualname__.removesuffix('.Config')}"


def shown_type(cls: type) -> str:
    """`type_name` for messages, with the shortest package that exports the class, as in `axcore.infer.Engine`."""
    name, modules = cls.__qualname__.removesuffix(".Config"), cls.__module__.split(".")
    for count in range(1, len(modules)):
        package = sys.modules.get(".".join(modules[:count]))
        if name in getattr(package, "__all__", ()):
            found = getattr(package, name, None)  # None while the package is imported
            if cls in (found, getattr(found, "Config", None)):
                return f"{'.'.join(modules[:count])}.{name}"
    return type_name(cls)


def _check_known(cls: type[Config], name: str) -> None:
    if name not in cls.__dataclass_fields__:
        known = field_names(cls)
        raise ConfigError(
            f"{shown_type(cls)} has no field {name!r}.{did_you_mean(name, known)} It has: {', '.join(known) or 'none'}"
        )


def _store(cls: type[Config], name: str, value: object) -> object:
    """The value in the form that a node stores, checked against the annotation of its field."""
    value = frozen(value)
    hint = hints(cls).get(name, Any)
    if value is not REQUIRED and not conforms(value, hint):
        raise ConfigError(f"{shown_type(cls)}.{name} must be {required(value, hint)}, not {shown(value)}")
    return widened(value, hint)


def _measure(node: Config) -> None:
    """Stores the depth of a node.

    Raises:
        ConfigError: The tree is too deep.
    """
    depth = node.__dict__["_depth"] = 1 + max((depth_of(value) for _, value in fields(node)), default=0)
    if depth > MAX_DEPTH:
        raise ConfigError(
            f"{shown_type(type(node))} is {depth} levels deep, and a config has at most {MAX_DEPTH}. Hold the nodes in "
            f"a tuple instead of each other"
        )
