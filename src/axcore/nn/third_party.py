"""Config nodes for functions, classes and modules that were not written for axcore."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeGuard, Union

from flax import nnx

from axcore.config import (
    REQUIRED,
    Config,
    ConfigError,
    FrozenDict,
    MissingError,
    PositiveInt,
    did_you_mean,
    parse,
    register,
)
from axcore.config.codec import is_named
from axcore.config.types import conforms, describe
from axcore.module import BuildError, Layer, Rngs


class Call(Config):
    """A node that builds `function(**arguments)`. Arguments that are nodes themselves are built first.

    Create it with `axcore.call`. Arguments are checked against the signature of the function. The path of an argument
    in text and overrides is `path.arguments.NAME`.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = FrozenDict()

    def __post_init__(self) -> None:
        if self.function is not REQUIRED and self.arguments is not REQUIRED:
            object.__setattr__(self, "arguments", checked(self.function, self.arguments))

    def build(self, *args: object, **kwargs: object) -> Any:
        """Calls the function. `args` and `kwargs` are passed to it unchanged.

        Raises:
            ConfigError: an argument is still REQUIRED.
        """
        given = {*list(parameters_of(self.function))[: len(args)], *kwargs}
        kept = {name: value for name, value in self.arguments.items() if value is not REQUIRED or name not in given}
        if missing := [name for name, value in kept.items() if value is REQUIRED]:
            raise MissingError(missing, label(self.function), "arguments")
        return self.function(*args, **built(kept), **kwargs)


def call(function: Callable[..., object], **arguments: object) -> Call:
    """A node that calls `function` with these arguments: `axcore.call(optax.scale_by_adam, b2=0.95)`.

    Arguments that the function requires and the call omits are REQUIRED.

    Raises:
        ConfigError: the function does not take an argument, or requires another type; or `function` cannot be imported
            by its name.
    """
    return Call(function=_registered(function, arguments), arguments=_needed(function) | arguments)


def checked(function: Callable[..., object], arguments: Mapping[str, object]) -> FrozenDict:
    """The arguments converted to the types of the function's signature; those from text and overrides are strings.

    Raises:
        ConfigError: the function does not take an argument, or requires another type.
    """
    parameters = parameters_of(function)
    takes_any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    taken = {
        name: each for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    fitted = {}
    for name, value in arguments.items():
        if name not in taken and not takes_any_name:
            raise ConfigError(f"{label(function)} takes no argument {name!r}.{did_you_mean(name, taken)}")
        hint = taken[name].annotation if name in taken else Any
        try:
            fitted[name] = _fitted(value, hint)
        except ValueError:
            raise ConfigError(f"{label(function)}: {name} must be {describe(hint)}, not {value!r}") from None
    return FrozenDict(fitted)


def _fitted(value: object, hint: object) -> object:
    """The value, converted to the annotated type. Only numbers and strings are checked, since annotations of other
    packages are often inexact."""
    arms = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    checkable = all(_is_checkable(arm) for arm in arms)
    if not checkable or not isinstance(value, bool | int | float | str) or conforms(value, hint):
        return float(value) if hint is float and type(value) is int else value
    if not isinstance(value, str):
        raise ValueError(value)
    return parse(value, hint)


def _is_checkable(hint: object) -> bool:
    """Whether `conforms` can check values against an annotation."""
    if typing.get_origin(hint) is not None:
        return typing.get_origin(hint) in (collections.abc.Callable, Literal, type)
    return isinstance(hint, type) and hint is not inspect.Parameter.empty and not getattr(hint, "_is_protocol", False)


def _needed(function: Callable[..., object]) -> dict[str, object]:
    """REQUIRED for each argument without a default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = parameters_of(function).items()
    return {name: REQUIRED for name, each in parameters if each.default is each.empty and each.kind in kinds}


def _registered[F: Callable[..., object]](function: F, arguments: Mapping[str, object]) -> F:
    """Registers the function, and functions among its arguments, so that config files can contain their names."""
    if not callable(function) or not is_named(function):
        raise ConfigError(
            f"{function!r} cannot be imported by its name; give a function or class at the top level of a module"
        )
    for value in (function, *arguments.values()):
        if is_named(value):
            register(value)
    return function


@functools.cache
def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function or of a class's constructor, which a metaclass may hide from `inspect`."""
    constructor: Callable[..., object] = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    try:
        found = inspect.signature(constructor, eval_str=True).parameters
    except ValueError:  # a builtin without a signature
        found = inspect.signature(lambda **arguments: None).parameters
    except Exception:  # an annotation that exists only for type checkers
        found = inspect.signature(constructor).parameters
    return dict(list(found.items())[1:]) if isinstance(function, type) else found


def label(function: Callable[..., object]) -> str:
    """The full name of a function or class."""
    return f"{function.__module__}.{function.__qualname__}"


def built(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments, with nodes replaced by the objects that they build."""
    return {name: value.build() if _builds(value) else value for name, value in arguments.items()}


def _builds(value: object) -> TypeGuard[Config]:
    return isinstance(value, Call) or (isinstance(value, Config) and value.target is not None)


WIDTHS = ("input_dim", "output_dim", "hidden_dim", "num_heads", "head_dim")
"""The widths that a parent may pass to a stock module."""
MODES = frozenset({"deterministic", "use_running_average"})
"""The attributes of stock modules that differ between training and evaluation. `axcore.invoke` sets those that are not
arguments of the node."""


class Stock(Layer):
    """A stock `nnx.Module` in the slot of a layer. Create its config with `axcore.stock`.

    The attribute `module` is the module; calling the layer calls it.
    """

    class Config(Layer.Config):
        module: Callable[..., Any]
        arguments: Mapping[str, Any] = FrozenDict()
        widths: Mapping[str, str] = FrozenDict()
        """Constructor argument -> the width of the parent that is passed to it."""
        input_dim: PositiveInt | None = None
        output_dim: PositiveInt | None = None
        hidden_dim: PositiveInt | None = None
        num_heads: PositiveInt | None = None
        head_dim: PositiveInt | None = None

        def __post_init__(self) -> None:
            if self.module is not REQUIRED and self.arguments is not REQUIRED:
                object.__setattr__(self, "arguments", checked(self.module, self.arguments))
                checked(self.module, dict.fromkeys(self.widths))
                missing = _needed(self.module).keys() - {"rngs", *self.arguments, *self.widths}
                if missing:
                    raise ConfigError(
                        f"{label(self.module)} requires {', '.join(sorted(missing))}. Add it to the arguments, or to "
                        f"the widths that the parent passes"
                    )
                if given := [name for name in self.arguments if name in ("rngs", *self.widths)]:
                    raise ConfigError(
                        f"{label(self.module)}: the parent sets {', '.join(given)}; remove it from the arguments"
                    )
            for width in self.widths.values():
                if width not in WIDTHS:
                    raise ConfigError(f"{width!r} is not a width that a parent passes.{did_you_mean(width, WIDTHS)}")

    config: Config
    uses_dtypes = False  # the arguments set the dtypes of the module

    def __init__(self, cfg: Config, *, rngs: Rngs):
        where = rngs.path or "the root"
        if missing := [name for name, value in cfg.arguments.items() if value is REQUIRED]:
            raise BuildError(f"{where}: {label(cfg.module)}: {', '.join(missing)} is REQUIRED; set it in arguments")
        arguments = built(cfg.arguments)
        for argument, width in cfg.widths.items():
            arguments[argument] = getattr(cfg, width)
            if arguments[argument] is None:
                raise BuildError(
                    f"{where}: {label(cfg.module)}: {argument} requires {width}, which the parent does not pass"
                )
        if "rngs" in parameters_of(cfg.module):
            arguments["rngs"] = rngs.nnx()
        self.module = cfg.module(**arguments)

    def __call__(self, *args: object, **kwargs: object) -> object:
        training = self.frame.mode
        if training is not None:  # in a direct call, train() and eval() have set the attributes
            modes = dict.fromkeys(MODES - self.config.arguments.keys(), not training)
            self.module.set_attributes(_is_stock, raise_if_not_found=False, **modes)
        return self.module(*args, **kwargs)


def _is_stock(path: object, node: object) -> bool:
    return not isinstance(node, Layer)


def stock(module: type[nnx.Module], *, widths: Mapping[str, str] | None = None, **arguments: object) -> Stock.Config:
    """A config that builds a stock module: `axcore.stock(nnx.Linear, widths={"in_features": "input_dim", ...})`.

    Args:
        module: the class.
        widths: constructor argument -> the width of the parent that is passed to it.
        arguments: the other constructor arguments, except `rngs`, which axcore passes.

    Raises:
        ConfigError: the constructor does not take an argument, or requires another type; or a width is not one of
            `WIDTHS`.
    """
    module, widths = _registered(module, arguments), dict(widths or {})
    needed = {name: value for name, value in _needed(module).items() if name not in ("rngs", *widths)}
    return Stock.Config(module=module, arguments=needed | arguments, widths=widths)
