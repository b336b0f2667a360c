"""Field annotations: checking values and parsing text."""

from __future__ import annotations

import ast
import collections.abc
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union

from axcore.config.ranges import Range


def cached[F: Callable[..., object]](fn: F) -> F:
    """`functools.cache` that keeps the signature, because type checkers do not consider a class hashable."""
    return functools.cache(fn)  # type: ignore[return-value]


@cached
def hints(cls: type) -> dict[str, object]:
    """Annotations of a config class by field. An annotation that fails to evaluate at run time counts as `Any`."""
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        for name, hint in inspect.get_annotations(base).items():
            if isinstance(hint, str):
                try:
                    hint = eval(hint, vars(sys.modules[base.__module__]), dict(vars(base)))
                except NameError:
                    hint = Any
            found[name] = hint
    return found


def describe(hint: object) -> str:
    """Formats an annotation, without ranges, for error messages."""
    hint = _unranged(hint)
    if hint is type(None):
        return "None"
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(arm) for arm in typing.get_args(hint))
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__qualname__
    if isinstance(origin := typing.get_origin(hint), type) and issubclass(origin, tuple | Mapping):
        items = ("..." if item is Ellipsis else describe(item) for item in typing.get_args(hint))
        return f"{origin.__qualname__}[{', '.join(items)}]"
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def required(value: object, hint: object) -> str:
    """What a field with the annotation `hint` requires instead of `value`: a type, or a range if the type fits."""
    return " or ".join(dict.fromkeys(_ranges(value, hint))) if conforms(value, hint, ranges=False) else describe(hint)


def _ranges(value: object, hint: object) -> Iterator[str]:
    """The requirement of each arm of an annotation whose ranges `value` does not fit."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated and conforms(value, args[0]) and isinstance(value, int | float):
        yield from (each.required(value) for each in args[1:] if isinstance(each, Range))
    elif origin in (Union, types.UnionType):
        for arm in args:
            yield from _ranges(value, arm)
    elif hint is type(None) or origin is Literal:
        yield describe(hint)
    elif isinstance(value, Mapping) and args:
        for key, item in value.items():
            if not conforms(item, args[-1]):
                yield f"{' or '.join(_ranges(item, args[-1]))} in {key!r}"
    elif isinstance(value, tuple) and args:
        for index, item in enumerate(value):
            arm = args[0] if args[-1] is Ellipsis else args[index]
            if not conforms(item, arm):
                yield f"{' or '.join(_ranges(item, arm))} in item {index}"


def _unranged(hint: object) -> object:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def conforms(value: object, hint: object, *, ranges: bool = True) -> bool:
    """Whether `value` fits the annotation `hint`. Unknown kinds of annotation accept every value.

    Args:
        ranges: Whether numbers must be in the declared ranges.
    """
    if hint is Any:
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = [each for each in args[1:] if isinstance(each, Range)] if ranges else []
        return conforms(value, args[0], ranges=ranges) and all(
            isinstance(value, int | float) and value in each for each in limits
        )
    if origin in (Union, types.UnionType):
        return any(conforms(value, arm, ranges=ranges) for arm in args)
    if origin is Literal:
        return any(value == arm and type(value) is type(arm) for arm in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(conforms(item, args[0], ranges=ranges) for item in value)
        return len(value) == len(args) and all(conforms(*pair, ranges=ranges) for pair in zip(value, args, strict=True))
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return isinstance(value, Mapping) and all(conforms(item, args[-1], ranges=ranges) for item in value.values())
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is collections.abc.Callable or hint is collections.abc.Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if isinstance(hint, type) and origin is None:
        return isinstance(value, hint)
    return True


def arms_of(hint: object) -> tuple[object, ...]:
    """The members of a union, without ranges; of another annotation, itself."""
    union = typing.get_origin(hint) in (Union, types.UnionType)
    return tuple(map(_unranged, typing.get_args(hint) if union else (hint,)))


def takes_function(hint: object) -> bool:
    """Whether an annotation accepts functions and no text."""
    arms = arms_of(hint)
    return str not in arms and any(collections.abc.Callable in (arm, typing.get_origin(arm)) for arm in arms)


def widened(value: object, hint: object) -> object:
    """The value with integers as floats where only floats are declared, so that 1 and 1.0 give equal configs."""
    origin, args, arms = typing.get_origin(hint), typing.get_args(hint), arms_of(hint)
    if type(value) is int and float in arms and int not in arms:
        return float(value) if abs(value) < 2**1023 else value
    if type(value) is tuple and origin is tuple and args:
        return tuple(widened(item, args[0] if args[-1] is Ellipsis else args[at]) for at, item in enumerate(value))
    if isinstance(value, Mapping) and isinstance(origin, type) and issubclass(origin, Mapping):
        return type(value)({key: widened(item, args[-1]) for key, item in value.items()})  # type: ignore[call-arg]
    return value


def parse(text: str, hint: object) -> object:
    """The value that `text` denotes for a field with the annotation `hint`. Ranges are not checked.

    Raises:
        ValueError: `text` does not denote a value that fits.
    """
    arms = arms_of(hint)
    if float in arms and text.lower().lstrip("+-") in ("inf", "infinity", "nan"):
        return float(text)
    if text.lower() in ("none", "null") and type(None) in arms:
        return None
    if bool in arms and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = text
    for candidate in (value, text):
        for arm in arms:
            fitted = _fit(candidate, arm)
            if arm is not Any and conforms(fitted, arm, ranges=False):
                return fitted
    if any(arm is Any or (not isinstance(arm, type) and not typing.get_origin(arm)) for arm in arms):
        return value
    raise ValueError(f"{text!r} is not {describe(hint)}")


def _fit(value: object, hint: object) -> object:
    """Converts values as a user types them: a list to a tuple, `a,b` to a tuple of strings, 1 to 1.0."""
    hint = _unranged(hint)
    if typing.get_origin(hint) is tuple:
        if isinstance(value, str):
            value = tuple(part.strip() for part in value.strip("()[]").split(",") if part.strip())
        items = tuple(value) if isinstance(value, list | tuple) else (value,)
        args = typing.get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            args = (args[0],) * len(items)
        if len(args) != len(items):
            return items
        return tuple(map(_fit, items, args))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
