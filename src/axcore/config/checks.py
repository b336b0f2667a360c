"""Checks that annotations cannot express."""

from __future__ import annotations

from axcore.config.errors import ConfigError
from axcore.config.node import REQUIRED, Config


def at_least(cfg: Config, least: float, *names: str) -> None:
    """Checks that each of the named fields is at least `least`. Fields that are None or REQUIRED are skipped.

    Raises:
        ConfigError: A field is below the bound. The message names the field, its value and the bound.
    """
    for name in names:
        value = getattr(cfg, name)
        if value is not None and value is not REQUIRED and not value >= least:  # `not ... >=` also catches NaN
            raise ConfigError(f"{name} must be at least {least}, not {value!r}")
