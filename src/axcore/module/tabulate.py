"""Support for `nnx.tabulate`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx


def list_calls(module: nnx.Module) -> None:
    """Adapts the methods that `nnx.tabulate` has replaced, if it is the caller.

    While it runs, `nnx.tabulate` replaces the public methods of every class in the module by functions that call them
    in `jax.jit` and list their arguments. Methods other than `__call__` may return values that are not arrays, so they
    are restored. Of positional arguments it can list only arrays, so those after the first are passed by name. A layer
    that takes `*args`, such as a stack, is not listed.
    """
    if not hasattr(module, "_nnx_tabulate_id"):
        return
    for cls in {type(node) for _, node in nnx.iter_modules(module)}:
        listed: Any  # Any: a function with the attributes of functools.wraps
        for name, listed in inspect.getmembers(cls, inspect.isfunction):
            if listed.__code__.co_filename == nnx.tabulate.__code__.co_filename:
                setattr(cls, name, _by_name(listed) if name == "__call__" else listed.__wrapped__)


def _by_name(listed: Any) -> Callable[..., object]:  # Any: see above
    """The function, called with all arguments but the first by name."""
    parameters = list(inspect.signature(listed).parameters.values())[2:]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        own: Callable[..., object] = listed.__wrapped__
        return own

    @functools.wraps(listed)
    def call(self: nnx.Module, first: object, *args: object, **kwargs: object) -> object:
        named = {each.name: value for each, value in zip(parameters, args, strict=False)}
        return listed(self, first, **named, **kwargs)

    return call
