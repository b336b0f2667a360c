"""Overrides from the command line: `path=value`, typed by the field that the path names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from axcore.config.errors import ConfigError
from axcore.config.node import Config, type_name
from axcore.config.tree import get, put
from axcore.config.types import describe, hints, parse


def override[C: Config](cfg: C, assignments: Iterable[str]) -> C:
    """Applies each `path=value` in order.

    Raises:
        ConfigError: no `=`, an unknown path (the nearest is suggested), or a value of the wrong type.
    """
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set takes path=value, not {assignment!r}")
        cfg = _assign(cfg, path.strip(), value.strip())
    return cfg


def _assign[C: Config](cfg: C, path: str, value: str) -> C:
    parent_path, _, name = path.rpartition(".")
    get(cfg, path)  # an unknown path is reported whole
    parent = get(cfg, parent_path)
    if not isinstance(parent, Config):
        raise ConfigError(f"{path}: set the whole of {parent_path!r} instead of one entry")
    hint = hints(type(parent)).get(name, Any)
    if isinstance(getattr(parent, name), Config) and value.lower() != "none":
        held = type_name(type(getattr(parent, name)))
        raise ConfigError(f"{path} is a node ({held}); set one of its fields, as in {path}.FIELD=VALUE")
    try:
        return put(cfg, path, parse(value, hint))
    except ValueError:
        raise ConfigError(f"{path} must be {describe(hint)}, not {value!r}") from None
