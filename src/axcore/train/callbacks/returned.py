"""Validates what callbacks and evaluators return."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import cast

from axcore.config import ConfigError
from axcore.train.callbacks.base import CallbackRequest
from axcore.train.files import Json


def request(value: object, method: str) -> CallbackRequest | None:
    """A request to the trainer.

    Raises:
        ConfigError: the value is neither a request nor None.
    """
    if value is None or isinstance(value, CallbackRequest):
        return value
    raise ConfigError(f"{method} must return a CallbackRequest or None, got {_shown(value)}")


def metrics(value: object, method: str) -> dict[str, float]:
    """Metrics as Python numbers.

    Raises:
        ConfigError: the value is not a mapping from names to real numbers.
    """
    return {name: _number(name, each, method) for name, each in _mapping(value, method, "metric names to numbers")}


def entries(value: object, method: str, taken: Collection[str] = ()) -> dict[str, Json]:
    """Values for a JSON file.

    Raises:
        ConfigError: the value is not a mapping, JSON cannot hold an entry, or a name is in `taken`.
    """
    found = dict(_mapping(value, method, "names to JSON values"))
    for name, each in found.items():
        if name in taken:
            raise ConfigError(f"{method} returns {name!r}, which already has a value. Choose another name.")
        try:
            json.dumps(each)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{method} must return values that JSON can hold, got {name}={_shown(each)}: {error}. Convert arrays "
                f"with tolist() and scalars with int() or float()."
            ) from error
    return cast("dict[str, Json]", found)


def _mapping(value: object, method: str, kind: str) -> Collection[tuple[str, object]]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise ConfigError(f"{method} must return a mapping from {kind}, got {_shown(value)}")
    return value.items()


def _number(name: str, value: object, method: str) -> float:
    try:
        if isinstance(value, int):
            return value
        if not isinstance(value, str | bytes):
            return float(value)  # type: ignore[arg-type]  # arrays of one element too
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{method} must return numbers, got {name}={_shown(value)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
