"""Codecs for leaf values: how each kind of value is displayed, written to JSON and read back.

Reading never imports a module. A name in a file is looked up among the values registered in this process.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from types import CodeType, MethodType
from typing import Any

from axcore.config.errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Codec[T, J]:
    """How values of type T are written, as JSON values of type J.

    Attributes:
        tag: The kind of value in JSON, as in `{"$dtype": "bfloat16"}`.
        write: Converts a value to a JSON value.
        read: The inverse of `write`.
        show: Formats a value for display. Values with the same text are equal.
        freeze: The form in which a config stores a value: one that nobody can change.
    """

    tag: str
    write: Callable[[T], J]
    read: Callable[[J], T]
    show: Callable[[T], str] = str
    freeze: Callable[[T], T] = lambda value: value


_codecs: dict[type, Codec[Any, Any]] = {}  # Any: each codec has its own types
_by_tag: dict[str, Codec[Any, Any]] = {}
_named: dict[str, object] = {}
_names: dict[int, tuple[str, object]] = {}


def register_codec[T, J](cls: type[T], codec: Codec[T, J]) -> None:
    """Registers how configs write values of `cls` and of its subclasses."""
    _codecs[cls] = _by_tag[codec.tag] = codec


def register[T](value: T, name: str | None = None) -> T:
    """Lets JSON refer to a function, class or enum member by `name`, by default its qualified name.

    Registering an enum or one of its members registers all members.
    """
    members = type(value) if isinstance(value, enum.Enum) else value if isinstance(value, enum.EnumMeta) else ()
    for each in (value, *members):
        if id(each) not in _names:  # keep the first name, because a config class registers its defaults again
            known = name if name and each is value else public_name(each)
            _named[known], _names[id(each)] = each, (known, each)  # the reference keeps the id from being reused
    return value


def public_name(value: object) -> str:
    """`module.qualname` of a function or class, `module.qualname.NAME` of an enum member."""
    if isinstance(value, enum.Enum):
        return f"{public_name(type(value))}.{value.name}"
    name = f"{value.__module__}.{getattr(value, '__qualname__')}"  # noqa: B009 - `object` does not declare it
    code = getattr(value, "__code__", None)
    held: tuple[object, ...] = ()
    if "<l" in name and isinstance(code, CodeType):  # lambdas share a name, and so do the functions of a factory
        closure: tuple[object, ...] = tuple(cell.cell_contents for cell in getattr(value, "__closure__", None) or ())
        held = tuple(each for each in closure if each is not value)
        for given in (getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None)):
            held += (given,) if given else ()
        if "<lambda>" in name:
            held += code.co_code, code.co_names, *(getattr(each, "co_code", each) for each in code.co_consts)
    if isinstance(value, MethodType) and not isinstance(value.__self__, type):
        held += (value.__self__,)  # methods of two objects share a name
    return name + (f"#{hashlib.sha256(render(held).encode(errors='replace')).hexdigest()[:8]}" if held else "")


def name_of(value: object) -> str:
    """The name under which a value is registered, or else its qualified name."""
    return _names[id(value)][0] if id(value) in _names else public_name(value)


def codec_of(value: object) -> Codec[Any, Any] | None:
    cls = type(value)
    found = next((_codecs[base] for base in cls.__mro__ if base in _codecs), None)
    if found is None and hasattr(cls, "__array__") and cls.__module__.partition(".")[0] in ("numpy", "jax", "jaxlib"):
        found = _array_codec(cls)
    return found


def _array_codec(cls: type) -> Codec[Any, Any] | None:
    """The codec of a class of arrays, which it registers; None for NumPy's scalars, which are immutable."""
    from axcore.config import arrays  # imports NumPy

    if arrays.is_scalar(cls):
        return None
    codec = _codecs.get(arrays.BASE) or Codec("array", arrays.write, arrays.read, arrays.show, arrays.frozen)
    for each in (arrays.BASE, cls):
        register_codec(each, codec)
    return codec


def same(one: object, other: object) -> bool:
    """Whether two values of a field are equal: NaN equals NaN, but 1 equals neither 1.0 nor True. Order counts."""
    if one is other:
        return True
    if (codec := codec_of(one)) is not None:
        return codec is codec_of(other) and bool(codec.write(one) == codec.write(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return repr(one) == repr(other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one.items(), other.items(), strict=True))
    try:
        return bool(one == other)
    except Exception:  # an object whose comparison has no truth value
        return False


def digest(value: object) -> int:
    """A hash of the value of a field that agrees with `same`."""
    if (codec := codec_of(value)) is not None:
        return hash(codec.show(value))
    if isinstance(value, float):
        return hash(repr(value))
    if isinstance(value, tuple):
        return hash(tuple(map(digest, value)))
    if isinstance(value, Mapping):
        return hash(tuple(digest(item) for item in value.items()))
    try:
        return hash(value)
    except TypeError:  # unhashable
        return hash(type(value))


def is_named(value: object) -> bool:
    """Whether configs write a value by its name: an enum member, a class or a function."""
    return isinstance(value, enum.Enum | type) or (callable(value) and hasattr(value, "__qualname__"))


def render(value: object) -> str:
    """A leaf value as one line of text, the same in every process."""
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return _one_line(json.dumps(value, ensure_ascii=False))
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(render, value))) + "}"
    if isinstance(value, functools.partial):
        arguments = [render(value.func), *map(render, value.args)]
        return f"partial({', '.join([*arguments, *(f'{key}={render(item)}' for key, item in value.keywords.items())])})"
    if isinstance(value, tuple) and codec_of(value) is None:
        return f"({', '.join(map(render, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{render(key)}: {render(item)}" for key, item in value.items()) + "}"
    if is_named(value):
        return name_of(value)
    if (codec := codec_of(value)) is not None:
        return codec.show(value)
    if isinstance(value, float):
        return float.__repr__(value)  # the repr of a NumPy float includes its type
    # The repr of a class without one does not tell two objects apart.
    if type(value).__repr__ is object.__repr__ and getattr(value, "__dict__", None):
        return f"{public_name(type(value))}({_attributes(value)})"
    return _one_line(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))  # an address differs between processes


@reprlib.recursive_repr("...")
def _attributes(value: object) -> str:
    return ", ".join(f"{name}={render(item)}" for name, item in vars(value).items())


def shown(value: object) -> str:
    """A value in a message: like its repr, but a function has its name and no address."""
    return repr(value) if isinstance(value, str) and not isinstance(value, enum.Enum) else render(value)


def _one_line(text: str) -> str:
    """Escapes every character that a reader could treat as the end of a line."""
    if text.isascii() and text.isprintable():
        return text
    return re.sub("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def write(value: object) -> object:
    """A leaf value as JSON.

    Raises:
        ConfigError: No codec is registered for the value, or it is a function or class that is not registered.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if (codec := codec_of(value)) is not None:
        return {f"${codec.tag}": codec.write(value)}
    if is_named(value):
        if id(value) in _names:
            return {"$name": name_of(value)}
        raise ConfigError(
            f"{name_of(value)} cannot be written, because it is not registered. Register it with axcore.register"
        )
    raise ConfigError(
        f"{value!r} of type {type(value).__name__} cannot be written, because its class has no codec. "
        f"Register one with axcore.register_codec"
    )


def named(name: str) -> object:
    """The value registered under a name.

    Raises:
        ConfigError: No value is registered under the name.
    """
    if name not in _named:
        raise ConfigError(
            f"{name!r} is not registered in this process.{did_you_mean(name, _named)} "
            f"Import the module that defines it, and register a plain function with axcore.register"
        )
    return _named[name]


def named_function(name: str) -> object:
    """The function registered under a name, or the only one whose name ends with it: `gelu` for `jax.nn.gelu`.

    Raises:
        ConfigError: No function, or several functions, have this name.
    """
    known = {each: value for each, value in _named.items() if callable(value) and not isinstance(value, type)}
    found = [name] if name in known else [each for each in known if each.endswith(f".{name}")]
    if len({id(known[each]) for each in found}) > 1:
        raise ConfigError(f"it may be {' or '.join(sorted(found))}. Give the whole name")
    if not found:
        short = {each.rpartition(".")[2] for each in known}
        raise ConfigError(f"no function is registered under that name.{did_you_mean(name, [*known, *short])}")
    return known[found[0]]


def read(tag: str, content: object) -> object:
    """The value of `{tag: content}`.

    Raises:
        ConfigError: No codec has this tag, or no value is registered under the name that `content` gives.
    """
    if tag == "$array":
        from axcore.config import arrays  # imports NumPy

        return arrays.read(content)
    readers: dict[str, Callable[[Any], object]] = {f"${each.tag}": each.read for each in _by_tag.values()}
    readers |= {"$float": float, "$name": named}
    if tag not in readers:
        raise ConfigError(f"no codec is registered for {tag!r}.{did_you_mean(tag, readers)}")
    return readers[tag](content)
