"""Leaf values that are neither numbers nor text: how each kind is shown, written to JSON and read back.

Reading never imports: a name in a file is looked up among what this process has registered.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from axcore.config.errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Codec:
    """How values of one class are written.

    Attributes:
        tag: names the kind in JSON, as in `{"$dtype": "bfloat16"}`.
        write: value -> JSON value.
        read: the inverse.
        show: value -> text, for people.
    """

    tag: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    show: Callable[[Any], str] = str


_codecs: dict[type, Codec] = {}
_by_tag: dict[str, Codec] = {}
_named: dict[str, Any] = {}
_names: dict[int, tuple[str, Any]] = {}


def register_codec(cls: type, codec: Codec) -> None:
    """Makes values of a class, and of its subclasses, representable in configs."""
    _codecs[cls] = _by_tag[codec.tag] = codec


def register[T](value: T, name: str | None = None) -> T:
    """Makes a function, class or enum member readable from JSON under its own, or the given, name.

    An enum, or a member of one, brings all its members.
    """
    members = type(value) if isinstance(value, enum.Enum) else value if isinstance(value, enum.EnumMeta) else ()
    for each in (value, *members):
        if id(each) not in _names:  # the first name stays: a class may use as default what was registered before
            known = name if name and each is value else public_name(each)
            _named[known], _names[id(each)] = each, (known, each)  # held, so that its id stays its own
    return value


def public_name(value: Any) -> str:
    """`module.qualname` of a function or class; of an enum member, with its name behind."""
    if isinstance(value, enum.Enum):
        return f"{public_name(type(value))}.{value.name}"
    name = f"{value.__module__}.{value.__qualname__}"
    if "<l" in name and (code := getattr(value, "__code__", None)):  # lambdas share names; so do a factory's functions
        held = tuple(each for cell in value.__closure__ or () if (each := cell.cell_contents) is not value)
        if "<lambda>" in name:
            held += code.co_code, code.co_names, *(getattr(each, "co_code", each) for each in code.co_consts)
        name += f"#{hashlib.sha256(render(held).encode(errors='replace')).hexdigest()[:8]}" if held else ""
    return name


def name_of(value: Any) -> str:
    """The name that a value is registered under, else its own."""
    return _names[id(value)][0] if id(value) in _names else public_name(value)


def codec_of(value: Any) -> Codec | None:
    return next((_codecs[cls] for cls in type(value).__mro__ if cls in _codecs), None)


def is_named(value: Any) -> bool:
    """Whether a value is known by a name: an enum member, a class, a function."""
    return isinstance(value, enum.Enum | type) or (callable(value) and hasattr(value, "__qualname__"))


def render(value: Any) -> str:
    """A leaf value on one line, the same in every process."""
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
        return float.__repr__(value)  # NumPy's shows its type
    return _one_line(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))  # an address differs between processes


def _one_line(text: str) -> str:
    """Escapes what some reader could take for the end of a line."""
    if text.isascii() and text.isprintable():
        return text
    return re.sub("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def write(value: Any) -> Any:
    """A leaf value as JSON; a ConfigError when nobody said how to write it."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if (codec := codec_of(value)) is not None:
        return {f"${codec.tag}": codec.write(value)}
    if is_named(value):
        if id(value) in _names:
            return {"$name": name_of(value)}
        raise ConfigError(f"{name_of(value)} cannot be written: it could not be read back; axcore.register it first")
    raise ConfigError(f"{value!r} of type {type(value).__name__} cannot be written; axcore.register_codec its class")


def named(name: str) -> Any:
    """What is registered under a name; a ConfigError when nothing is."""
    if name not in _named:
        raise ConfigError(
            f"{name!r} is not registered in this process.{did_you_mean(name, _named)} "
            f"Import what defines it, and axcore.register it if it is a plain function"
        )
    return _named[name]


def read(tag: str, content: Any) -> Any:
    """The value of `{tag: content}`; a ConfigError when this process knows no such kind or name."""
    readers: dict[str, Callable[[Any], Any]] = {f"${each.tag}": each.read for each in _by_tag.values()}
    readers |= {"$float": float, "$name": named}
    if tag not in readers:
        raise ConfigError(f"no codec for {tag!r}.{did_you_mean(tag, readers)}")
    return readers[tag](content)
