"""What was not written for axcore, as nodes of a config: functions, classes, stock `nnx.Module`s."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from flax import nnx

from axcore.config import REQUIRED, Config, ConfigError, FrozenDict, MissingError, did_you_mean, parse, register
from axcore.config.codec import is_named
from axcore.config.types import conforms, describe
from axcore.module import BuildError, Layer, Rngs


class Call(Config):
    """`function(**arguments)`, made when the node is built. Arguments that are nodes are built first.

    Make it with `axcore.call`. Arguments are checked against the function's signature; in text and overrides one is
    `path.arguments.NAME`.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = FrozenDict()

    def __post_init__(self) -> None:
        if self.function is not REQUIRED and self.arguments is not REQUIRED:
            object.__setattr__(self, "arguments", checked(self.function, self.arguments))

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; further arguments go to it as they are.

        Raises:
            ConfigError: an argument is still REQUIRED.
        """
        given = {*list(parameters_of(self.function))[: len(args)], *kwargs}
        held = {name: value for name, value in self.arguments.items() if value is not REQUIRED or name not in given}
        if missing := [name for name, value in held.items() if value is REQUIRED]:
            raise MissingError(missing, label(self.function), "arguments")
        return self.function(*args, **made(held), **kwargs)


def call(function: Callable[..., Any], **arguments: Any) -> Call:
    """A node that calls `function` with these arguments: `axcore.call(optax.scale_by_adam, b2=0.95)`.

    Arguments that the function requires and that are not given stay REQUIRED.

    Raises:
        ConfigError: an argument that the function does not take (the nearest is suggested), or of another type than it
            says; something that is no function or class by a name of its own.
    """
    return Call(function=_registered(function, arguments), arguments=_needed(function) | arguments)


def checked(function: Callable[..., Any], arguments: Mapping[str, Any]) -> FrozenDict:
    """The arguments, as text may have brought them, in the types that the function's signature asks for.

    Raises:
        ConfigError: one that the function does not take, or of another type.
    """
    parameters = parameters_of(function)
    free = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    taken = {
        name: each for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    fitted = {}
    for name, value in arguments.items():
        if name not in taken and not free:
            raise ConfigError(f"{label(function)} takes no argument {name!r}.{did_you_mean(name, taken)}")
        hint = taken[name].annotation if name in taken else Any
        try:
            fitted[name] = _fitted(value, hint)
        except ValueError:
            raise ConfigError(f"{label(function)}: {name} must be {describe(hint)}, not {value!r}") from None
    return FrozenDict(fitted)


def _fitted(value: Any, hint: Any) -> Any:
    """Only numbers and text are held against an annotation: those of other packages are seldom exact."""
    arms = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    clear = all(_is_clear(arm) for arm in arms)
    if not clear or not isinstance(value, bool | int | float | str) or conforms(value, hint):
        return float(value) if hint is float and type(value) is int else value
    if not isinstance(value, str):
        raise ValueError(value)
    return parse(value, hint)


def _is_clear(hint: Any) -> bool:
    """Whether `conforms` can tell what belongs to an annotation."""
    if typing.get_origin(hint) is not None:
        return typing.get_origin(hint) in (collections.abc.Callable, Literal, type)
    return isinstance(hint, type) and hint is not inspect.Parameter.empty and not getattr(hint, "_is_protocol", False)


def _needed(function: Callable[..., Any]) -> dict[str, Any]:
    """REQUIRED for each argument that the function cannot do without."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = parameters_of(function).items()
    return {name: REQUIRED for name, each in parameters if each.default is each.empty and each.kind in kinds}


def _registered[F: Callable[..., Any]](function: F, arguments: Mapping[str, Any]) -> F:
    """Makes the function, and those among its arguments, readable from a file."""
    if not callable(function) or not is_named(function):
        raise ConfigError(f"{function!r} has no name that a file could hold; give a function or a class")
    for value in (function, *arguments.values()):
        if is_named(value):
            register(value)
    return function


@functools.cache
def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, or of a class's constructor (a metaclass may hide them from `inspect`)."""
    constructor: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    try:
        found = inspect.signature(constructor, eval_str=True).parameters
    except ValueError:  # a builtin that does not tell
        found = inspect.signature(lambda **arguments: None).parameters
    except Exception:  # an annotation that only a type checker can see
        found = inspect.signature(constructor).parameters
    return dict(list(found.items())[1:]) if isinstance(function, type) else found


def label(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def made(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with nodes among them built."""
    return {name: value.build() if _builds(value) else value for name, value in arguments.items()}


def _builds(value: Any) -> bool:
    return isinstance(value, Call) or (isinstance(value, Config) and value.target is not None)


WIDTHS = ("input_dim", "output_dim", "hidden_dim", "num_heads", "head_dim")
"""What a parent may pass to a stock module."""


class Stock(Layer):
    """Any `nnx.Module` in a slot for a layer. Make its config with `axcore.stock`.

    The module is held as `module`; a call of the layer is a call of it.
    """

    class Config(Layer.Config):
        module: Callable[..., Any]
        arguments: Mapping[str, Any] = FrozenDict()
        widths: Mapping[str, str] = FrozenDict()
        """Constructor argument -> the width of the parent that it gets."""
        input_dim: int | None = None
        output_dim: int | None = None
        hidden_dim: int | None = None
        num_heads: int | None = None
        head_dim: int | None = None

        def __post_init__(self) -> None:
            if self.module is not REQUIRED and self.arguments is not REQUIRED:
                object.__setattr__(self, "arguments", checked(self.module, self.arguments))
                checked(self.module, dict.fromkeys(self.widths))
                if given := [name for name in self.arguments if name in ("rngs", *self.widths)]:
                    raise ConfigError(f"{label(self.module)}: {', '.join(given)} comes from the parent")
            for width in self.widths.values():
                if width not in WIDTHS:
                    raise ConfigError(f"no parent passes {width!r}.{did_you_mean(width, WIDTHS)}")

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        where = rngs.path or "the root"
        if missing := [name for name, value in cfg.arguments.items() if value is REQUIRED]:
            raise BuildError(f"{where}: {label(cfg.module)} needs {', '.join(missing)}: REQUIRED, and nobody set it")
        arguments = made(cfg.arguments)
        for argument, width in cfg.widths.items():
            arguments[argument] = getattr(cfg, width)
            if arguments[argument] is None:
                raise BuildError(f"{where}: the parent passes no {width} for {argument} of {label(cfg.module)}")
        if "rngs" in parameters_of(cfg.module):
            arguments["rngs"] = rngs.nnx()
        self.module = cfg.module(**arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def stock(module: type[nnx.Module], *, widths: Mapping[str, str] | None = None, **arguments: Any) -> Stock.Config:
    """A config that builds a stock module: `axcore.stock(nnx.Linear, widths={"in_features": "input_dim", ...})`.

    Args:
        widths: which of its constructor's arguments get which width of the parent.
        arguments: its other constructor arguments; `rngs` is passed by axcore.

    Raises:
        ConfigError: an argument that the constructor does not take, or of another type than it says; a width that no
            parent passes.
    """
    module, widths = _registered(module, arguments), dict(widths or {})
    needed = {name: value for name, value in _needed(module).items() if name not in ("rngs", *widths)}
    return Stock.Config(module=module, arguments=needed | arguments, widths=widths)
