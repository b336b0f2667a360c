"""The module tree of a config, built from shapes without arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax
from flax import nnx

from axcore.config import Config, ConfigError, get, has_field
from axcore.config.codec import render
from axcore.config.memory import size
from axcore.config.node import default, fields
from axcore.module import Layer, abstract
from axcore.plugin import registry


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter or other Variable of a module.

    Attributes:
        kind: The class of the Variable, such as `Param` or `BatchStat`.
        count: The number of elements of a parameter; 0 for other Variables.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    count: int
    bytes: int

    def __str__(self) -> str:
        axes = ", ".join(axis or "-" for axis in self.axes)
        kind = "" if self.kind == "Param" else f"  {self.kind}"
        return f"{self.name}  {list(self.shape)} {self.dtype} ({axes})  {size(self.bytes)}{kind}"


@dataclasses.dataclass(frozen=True)
class ModuleNode:
    """A module.

    Attributes:
        name: The attribute under which the parent stores the module.
        kind: The class of the module.
        supplier: The distribution that provides the class.
        settings: Config fields that differ from their defaults, as text, except those that the tree shows elsewhere.
        count: The number of elements of all parameters, including descendants.
        bytes: The size of all Variables, including descendants.
    """

    name: str
    kind: str
    supplier: str
    parameters: tuple[Parameter, ...]
    children: tuple[ModuleNode, ...]
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(parameter.count for parameter in self.parameters) + sum(child.count for child in self.children)

    @property
    def bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters) + sum(child.bytes for child in self.children)

    def __str__(self) -> str:
        return "\n".join(self._lines("", ""))

    def _lines(self, first: str, rest: str) -> Iterator[str]:
        head = f"{first}{self.name}  {self.kind}" if self.name else f"{first}{self.kind}"
        settings = "".join(f"  {name}={value}" for name, value in self.settings.items())
        yield f"{head:64} {self.count:>16,}  {size(self.bytes):>10}  {self.supplier}{settings}"
        below: list[Parameter | ModuleNode] = [*self.parameters, *self.children]
        for index, item in enumerate(below):
            last = index == len(below) - 1
            start, indent = rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  ")
            if isinstance(item, ModuleNode):
                yield from item._lines(start, indent)
            else:
                yield f"{start}{item}"


def module_tree(cfg: Config, path: str = "") -> ModuleNode:
    """The module tree of a model's config. Allocates no arrays.

    Args:
        path: The path of `cfg` in a larger config, for error messages.

    Raises:
        ConfigError: `cfg` is not a config that builds a module.
    """
    if not isinstance(cfg, Config):
        raise ConfigError(f"{path or 'the root'} is {cfg!r}, which is not the config of a module")
    fn, params, state = abstract(cfg, path)
    return _node("", fn.bind(params, state))


def tree(cfg: Config) -> ModuleNode:
    """The module tree of a model's config, or of the model in a trainer's config, as `axcore tree` prints it.

    Raises:
        ConfigError: the config builds no module, or `cfg` is not a config.
    """
    if not isinstance(cfg, Config):
        raise ConfigError(f"tree requires a config, not {cfg!r}; for a recipe, pass axcore.recipe(name)")
    return module_tree(get(cfg, "model"), "model") if has_field(cfg, "model") else module_tree(cfg)


def _node(name: str, module: object) -> ModuleNode:
    parameters, children = [], []
    for key, value in _entries(module):
        if isinstance(value, nnx.Variable):
            parameters.append(_parameter(key, value))
        elif isinstance(value, nnx.Module | nnx.List | nnx.Dict) and not (isinstance(value, nnx.List) and not value):
            children.append(_node(key, value))
    owner = registry().owner(type(module).__module__)
    supplier = str(owner) if owner else type(module).__module__.partition(".")[0]
    return ModuleNode(name, type(module).__name__, supplier, tuple(parameters), tuple(children), _settings(module))


def _settings(module: object) -> dict[str, str]:
    cfg = getattr(module, "config", None)
    if not isinstance(cfg, Config):
        return {}
    return {
        name: render(value)
        for name, value in fields(cfg)
        if not (name.endswith("dim") or name in ("axes", "dtypes"))  # shapes, axes and dtypes of the parameters
        and not isinstance(value, Layer.Config)  # a child
        and not (isinstance(value, tuple) and any(isinstance(each, Layer.Config) for each in value))
        and value != default(type(cfg), name)
    }


def _entries(module: object) -> list[tuple[str, object]]:
    if isinstance(module, nnx.List):
        return [(str(index), item) for index, item in enumerate(module)]
    entries: Mapping[str, object] = module if isinstance(module, Mapping) else vars(module)
    return [(str(key), value) for key, value in entries.items()]


def _parameter(name: str, variable: nnx.Variable[jax.Array]) -> Parameter:
    value = variable.get_value()
    axes = variable.get_metadata().get("axes") or (None,) * len(value.shape)
    count = math.prod(value.shape)
    counted = count if isinstance(variable, nnx.Param) else 0
    return Parameter(
        name, type(variable).__name__, value.shape, str(value.dtype), axes, counted, count * value.dtype.itemsize
    )
