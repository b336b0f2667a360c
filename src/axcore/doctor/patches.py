"""Finds the functions and classes of axcore, flax and jax that other code has replaced."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

WATCHED = ("axcore", "flax", "jax")


class Patches(importlib.abc.MetaPathFinder):
    """Records every module of these packages right after it is executed, before other code can change it."""

    def __init__(self) -> None:
        self._recorded: dict[str, dict[str, object]] = {}
        self._options: dict[str, object] = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in WATCHED:
                self._record(module)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders return, with a loader that records the module."""
        if name.partition(".")[0] not in WATCHED:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute: Callable[[ModuleType], None] = spec.loader.exec_module

            def recorded(module: ModuleType) -> None:
                execute(module)
                self._record(module)

            spec.loader.exec_module = recorded  # type: ignore[method-assign]
        return spec

    def _record(self, module: ModuleType) -> None:
        self._recorded[module.__name__] = dict(_attributes(module))
        if module.__name__ == "jax":
            self._options = dict(module.config.values)

    def found(self) -> list[str]:
        """The attributes that changed since the last call, each with the place of the new code."""
        changed: dict[str, str] = {}
        for name, before in list(self._recorded.items()):
            after = dict(_attributes(sys.modules[name])) if name in sys.modules else before
            for path in before | after:
                old, new = before.get(path), after.get(path)
                if old is not new and (_is_foreign(new) or (name.startswith("axcore") and path in before)):
                    changed[f"{name}.{path}"] = _place(new) if path in after else "deleted"
            self._recorded[name] = after
        return [f"{path} ({place})" for path, place in changed.items()]

    def options(self) -> list[str]:
        """The options of jax that changed since the last call, as `jax_enable_x64=True`."""
        now = dict(sys.modules["jax"].config.values) if self._options else {}
        changed = [f"{name}={value}" for name, value in now.items() if value != self._options.get(name)]
        self._options = now
        return changed


def _attributes(module: ModuleType) -> Iterator[tuple[str, object]]:
    """(path, value) of the functions and classes of a module, and of the functions in its own classes."""
    for name, value in list(vars(module).items()):
        if callable(value):
            yield name, value
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield from _methods(name, value)


def _methods(path: str, cls: type) -> Iterator[tuple[str, object]]:
    for name, value in list(vars(cls).items()):
        if isinstance(value, type) and value.__qualname__.startswith(f"{cls.__qualname__}."):
            yield from _methods(f"{path}.{name}", value)
        elif callable(value) or isinstance(value, property | classmethod | staticmethod):
            yield f"{path}.{name}", value


def _function(value: object) -> object:
    """The function in a property, class method, static method or partial function."""
    for name in ("fget", "__func__", "func"):
        value = getattr(value, name, None) or value
    return value


def _place(value: object) -> str:
    code = getattr(_function(value), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _is_foreign(value: object) -> bool:
    """Whether code outside of the watched packages defines a value."""
    code = getattr(_function(value), "__code__", None)
    if code is None:
        module = getattr(value, "__module__", None) or "builtins"
        return value is not None and module.partition(".")[0] not in {*WATCHED, *sys.stdlib_module_names}
    return not code.co_filename.startswith((*_FOLDERS, "<"))


_FOLDERS = tuple(
    folder + os.sep
    for name in WATCHED
    if (spec := importlib.util.find_spec(name)) is not None
    for folder in spec.submodule_search_locations or ()
)
