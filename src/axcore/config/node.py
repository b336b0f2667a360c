"""The node that every config is made of: a frozen, typed, keyword-only dataclass that knows what it builds."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from axcore.config.codec import Codec, name_of, named, public_name, register, register_codec
from axcore.config.errors import ConfigError, MissingError, did_you_mean
from axcore.config.history import Event, History, event
from axcore.config.types import cached, conforms, describe, hints

if TYPE_CHECKING:
    from axcore.config.text import Diff


class _Required:
    """The value of a field that the parent or the user must give."""

    def __repr__(self) -> str:
        return "REQUIRED"

    def __reduce__(self) -> str:
        return "REQUIRED"  # pickling keeps it one object

    def __bool__(self) -> bool:
        raise ConfigError("a field that is still REQUIRED was used as a value; set it first")


REQUIRED: Any = _Required()
register_codec(_Required, Codec("required", lambda _: None, lambda _: REQUIRED, repr))

_types: dict[str, type[Config]] = {}


def known_types() -> Mapping[str, type[Config]]:
    """Every config class of this process, by the name that text and JSON show."""
    return _types


def _refuse(self: FrozenDict, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("a FrozenDict cannot be changed; make a new one: {**old, key: value}")


class FrozenDict(dict[str, Any]):
    """An immutable, hashable dict; what a `Mapping` field of a config is stored as."""

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))  # dicts are equal in any order

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
class Config:
    """Base of every config node. A subclass declares typed fields and nothing else.

    ```python
    class Config(ax.Config):
        input_dim: int = ax.REQUIRED
        norm: RMSNorm.Config = RMSNorm.Config()
    ```

    Nodes are immutable: `set` returns a new one, and `axcore.select` edits whole trees. A node nested in a
    `Configurable` class builds that class; one that is nested nowhere is a plain value (a mask, an initializer).

    Raises:
        ConfigError: an unknown field, or a value that does not fit the field's annotation.
    """

    target: ClassVar[Any] = None
    """The class that `build` makes, or None for a plain value."""

    layout_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of this class that change how or where something is computed, or what is recorded, but not the result:
    a mesh, a kernel, rematerialization. A run may be resumed with other values of them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = inspect.get_annotations(cls)
        for name in own:
            if name not in cls.__dict__ and "ClassVar" not in str(own[name]):
                setattr(cls, name, REQUIRED)  # a field without a default is one that somebody must set
        for name in set(cls.__dict__) & set(getattr(cls, "__dataclass_fields__", ())) - set(own):
            raise ConfigError(
                f"{type_name(cls)}.{name} overrides a field; say its type again, as in `{name}: int = ...`"
            )
        dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(cls)
        init = cls.__init__

        @functools.wraps(init)
        def checked_init(self: Config, *args: Any, **values: Any) -> None:
            if args:
                raise ConfigError(f"{type_name(type(self))} takes its fields by name, not by position")
            for name in values:
                _check_known(type(self), name)
            given = {name: _store(type(self), name, value) for name, value in values.items()}
            init(self, **{name: default(type(self), name) for name in field_names(type(self))} | given)
            self.__dict__["_history"] = (event("made", *values),)

        _types[type_name(cls)] = cls
        for name in field_names(cls):
            value = cls.__dataclass_fields__[name].default  # type: ignore[attr-defined]
            if inspect.isroutine(value) or isinstance(value, type | enum.Enum):
                register(value)  # what a class declares as a default may be read back from a file
        cls.__init__ = checked_init  # type: ignore[assignment, method-assign]

    if not TYPE_CHECKING:  # a checker that saw it would take any name for a field

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            known = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
            raise AttributeError(f"{type_name(type(self))} has no field {name!r}.{did_you_mean(name, known)}")

    def set(self, **values: Any) -> Self:
        """A copy with these fields replaced."""
        for name in values:
            _check_known(type(self), name)
        return self._with(values, event(f"set {', '.join(values)}", *values))

    def _with(self, values: Mapping[str, Any], *events: Event) -> Self:
        """A copy with known fields replaced, and more events in its history."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.__dict__.update({name: _store(type(self), name, value) for name, value in values.items()})
        new.__dict__["_history"] = (*self.__dict__.get("_history", ()), *events)
        getattr(type(new), "__post_init__", lambda _: None)(new)
        return new

    def fill(self, **values: Any) -> Self:
        """A copy with what a parent knows. Each field must be REQUIRED or None here, or already hold that value."""
        for name, value in values.items():
            _check_known(type(self), name)
            held = getattr(self, name)
            if held is not REQUIRED and held is not None and held != value:
                raise ConfigError(
                    f"{name}={held!r} is set on {type_name(type(self))}, but its parent passes {name}={value!r}; "
                    f"leave it out of the child"
                )
        return self._with(values)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the target from this config. Extra arguments go to its constructor.

        Raises:
            ConfigError: a field is still REQUIRED, or the node is a plain value.
        """
        if self.target is None:
            raise ConfigError(f"{type_name(type(self))} is a plain value; it builds nothing")
        missing = [name for name, value in fields(self) if value is REQUIRED]
        if missing:
            raise MissingError(missing, type_name(type(self)))
        return self.target(self, *args, **kwargs)

    def text(self) -> str:
        """The tree as text, one value a line, in a stable order."""
        from axcore.config.text import text

        return text(self)

    def diff(self, base: Config) -> Diff:
        """What changed from `base` to this config."""
        from axcore.config.text import diff

        return diff(base, self)

    def history(self, path: str = "") -> History:
        """Who set the node or value at a path, in what order, and where.

        Raises:
            ConfigError: nothing is there.
        """
        from axcore.config.tree import history

        return history(self, path)

    def __getstate__(self) -> dict[str, Any]:
        """Functions that were registered under another name than their own are pickled by it: theirs may not lead to
        them (`jax.nn.silu` calls itself `jax._src.nn.functions.silu`)."""
        state = dict(self.__dict__)
        for name, value in fields(self):
            if inspect.isroutine(value) or (callable(value) and hasattr(value, "__qualname__")):
                known = name_of(value)
                state[name] = _ByName(known) if known != public_name(value) else value
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name, value in state.items():
            if isinstance(value, _ByName):
                self.__dict__[name] = named(value.name)

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in fields(self) if value is not default(type(self), name))
        return f"{type_name(type(self)).rpartition('.')[2]}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True)
class _ByName:
    """Stands for a registered value in a pickle."""

    name: str


class Configurable:
    """Base of a class that is built from its nested `Config`, as `cls(cfg, ...)`.

    A subclass that declares no `Config` of its own gets one that inherits its parent's fields, so that a node's type
    always tells which class it builds.
    """

    if TYPE_CHECKING:
        Config: type[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        node: Any = cls.__dict__.get("Config")
        if node is None:
            inherited = getattr(cls, "Config", Config)
            names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
            node = type("Config", (inherited,), {**names, "__doc__": inherited.__doc__})
            cls.Config = node
        if not issubclass(node, Config):
            raise TypeError(f"{cls.__qualname__}.Config must inherit axcore.Config or a parent's Config")
        node.target = cls


def fields(node: Config) -> Iterator[tuple[str, Any]]:
    """(name, value) of each field, in declaration order."""
    values = node.__dict__
    return ((name, values[name]) for name in field_names(type(node)))


@cached
def field_names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def has_field(node: Config, name: str) -> bool:
    return name in type(node).__dataclass_fields__  # type: ignore[attr-defined]


@cached
def default(cls: type[Any], name: str) -> Any:
    """The declared default of a field, as a node holds it; REQUIRED when there is none."""
    field = cls.__dataclass_fields__[name]
    if field.default_factory is not dataclasses.MISSING:
        return _store(cls, name, field.default_factory())
    return REQUIRED if field.default is dataclasses.MISSING else _store(cls, name, field.default)


def type_name(cls: type) -> str:
    """A node's type as text shows it: the class that it builds, with its module."""
    return f"{cls.__module__}.{cls.__qualname__.removesuffix('.Config')}"


def _check_known(cls: type[Config], name: str) -> None:
    if name not in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        known = field_names(cls)
        raise ConfigError(
            f"{type_name(cls)} has no field {name!r}.{did_you_mean(name, known)} It has: {', '.join(known) or 'none'}"
        )


def _store(cls: type[Config], name: str, value: Any) -> Any:
    """The value in the form that a frozen node keeps, checked against the field's annotation."""
    value = _frozen(value)
    hint = hints(cls).get(name, Any)
    if value is not REQUIRED and not conforms(value, hint):
        raise ConfigError(f"{type_name(cls)}.{name} must be {describe(hint)}, not {value!r}")
    return value


def _frozen(value: Any) -> Any:
    """Lists become tuples and dicts become FrozenDicts, at every depth."""
    if isinstance(value, (bool, int, float, str, Config)) or value is None:
        return value
    if isinstance(value, list) or type(value) is tuple:
        return tuple(map(_frozen, value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, Config) and not re.fullmatch(r"[\w-]+", str(key)):
                raise ConfigError(
                    f"{key!r} cannot be the key of a node: it becomes part of paths; use letters and digits"
                )
        return FrozenDict({key: _frozen(item) for key, item in value.items()})
    return value
