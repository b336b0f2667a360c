"""Modifiers: named functions from config to config that compose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from axcore.config.codec import shown
from axcore.config.errors import ConfigError
from axcore.config.frozen import FrozenDict
from axcore.config.history import acting
from axcore.config.node import Config


@dataclasses.dataclass(frozen=True)
class Modifier:
    """A named edit of a whole config tree. A plain function `Config -> Config` works too."""

    name: str
    edit: Callable[[Any], Any]  # Any: an edit may require a specific config class
    options: Mapping[str, object] = FrozenDict()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", FrozenDict(self.options))

    def __call__[C: Config](self, cfg: C) -> C:
        with acting(str(self)):
            edited: C = self.edit(cfg)
        return edited

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={shown(value)}' for key, value in self.options.items())})"


def pipe[C: Config](cfg: C, *modifiers: Callable[[C], C]) -> C:
    """Applies modifiers from left to right.

    Raises:
        ConfigError: A modifier did not return a config, usually because of a forgotten `return`.
    """
    for modifier in modifiers:
        changed = modifier(cfg)
        if not isinstance(changed, Config):
            name = getattr(modifier, "name", None) or getattr(modifier, "__qualname__", repr(modifier))
            raise ConfigError(f"modifier {name} returned {type(changed).__name__}, not a config")
        cfg = changed
    return cfg
