"""Checks of values that types cannot express."""

from __future__ import annotations

from axcore.config.errors import ConfigError
from axcore.config.node import REQUIRED, Config


def at_least(cfg: Config, least: float, *names: str) -> None:
    """Refuses fields below a bound. A field that is None or REQUIRED is none of this function's business.

    Raises:
        ConfigError: names the field, its value and the bound.
    """
    for name in names:
        value = getattr(cfg, name)
        if value is not None and value is not REQUIRED and not value >= least:  # not: NaN is below every bound
            raise ConfigError(f"{name} must be at least {least}, not {value!r}")
