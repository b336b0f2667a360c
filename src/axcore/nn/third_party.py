"""What was not written for axcore, as nodes of a config: functions, classes, stock `nnx.Module`s."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from axcore.config import REQUIRED, Config, ConfigError, FrozenDict, MissingError, did_you_mean, register
from axcore.module import BuildError, Layer, Rngs


class Call(Config):
    """`function(**arguments)`, made when the node is built. Arguments that are nodes are built first.

    Make it with `axcore.call`, which checks the arguments against the function's signature. In text and overrides an
    argument is `path.arguments.NAME`.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = FrozenDict()

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; further arguments go to it as they are.

        Raises:
            ConfigError: an argument is still REQUIRED.
        """
        missing = [name for name, value in self.arguments.items() if value is REQUIRED]
        if missing:
            raise MissingError(missing, label(self.function), "arguments")
        made = {name: value.build() if _builds(value) else value for name, value in self.arguments.items()}
        return self.function(*args, **made, **kwargs)


def call(function: Callable[..., Any], **arguments: Any) -> Call:
    """A node that calls `function` with these arguments: `axcore.call(optax.scale_by_adam, b2=0.95)`.

    Arguments that the function requires and that are not given stay REQUIRED.

    Raises:
        ConfigError: an argument that the function does not take; the nearest is suggested.
    """
    register(function)
    return Call(function=function, arguments=checked(function, arguments))


def checked(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, given: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The arguments, and REQUIRED for those that the function needs besides.

    Args:
        given: what the builder passes itself.
    """
    parameters = parameters_of(function)
    free = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name in arguments:
        if name not in parameters and not free:
            raise ConfigError(f"{label(function)} takes no argument {name!r}.{did_you_mean(name, parameters)}")
    needed = [
        name
        for name, each in parameters.items()
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    return {name: REQUIRED for name in needed if name not in given} | dict(arguments)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, or of a class's constructor (a metaclass may hide them from `inspect`)."""
    if not isinstance(function, type):
        return dict(inspect.signature(function).parameters)
    constructor: Any = function.__init__  # type: ignore[misc]
    return dict(list(inspect.signature(constructor).parameters.items())[1:])


def label(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _builds(value: Any) -> bool:
    return isinstance(value, Call) or (isinstance(value, Config) and value.target is not None)


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

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        arguments = dict(cfg.arguments)
        for argument, width in cfg.widths.items():
            arguments[argument] = getattr(cfg, width)
            if arguments[argument] is None:
                raise BuildError(f"{rngs.path}: the parent passes no {width} for {argument} of {label(cfg.module)}")
        missing = [name for name, value in arguments.items() if repr(value) == "REQUIRED"]
        if missing:
            raise BuildError(
                f"{rngs.path}: {label(cfg.module)} needs {', '.join(missing)}: REQUIRED, and nobody set it"
            )
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
        ConfigError: an argument that the constructor does not take.
    """
    register(module)
    widths = dict(widths or {})
    values = checked(module, {**dict.fromkeys(widths), **arguments}, given=("rngs",))
    values = {name: value for name, value in values.items() if name not in widths}
    return Stock.Config(module=module, arguments=values, widths=widths)
