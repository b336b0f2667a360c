"""Configs as JSON, and their content hash.

Reading looks up each type name among the config classes of this process and never imports a module.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from axcore.config import codec
from axcore.config.errors import ConfigError, did_you_mean
from axcore.config.frozen import FrozenDict
from axcore.config.node import Config, fields, known_types, type_name
from axcore.config.text import text
from axcore.config.tree import join


class _LocatedError(ConfigError):
    """A ConfigError whose message already begins with the path."""


def to_json(root: Config, *, indent: int | None = 2) -> str:
    """The tree as JSON, which `from_json` reads.

    Raises:
        ConfigError: A value cannot be written so that `from_json` can read it.
    """
    return json.dumps(_write(root, ""), indent=indent, ensure_ascii=False, allow_nan=False)


def from_json(content: str) -> Any:  # Any: `content` names the class
    """Reads a config that `to_json` wrote.

    Raises:
        ConfigError: The text is not JSON of a config, names an unknown type, function or field, or holds a value that
            does not fit its field. The message names the path.
    """
    try:
        root = _read(json.loads(content), "")
    except RecursionError:
        raise ConfigError("the JSON is nested too deeply to be a config") from None
    except ValueError as error:
        raise ConfigError(f"the text is not JSON: {error}") from None
    if not isinstance(root, Config):
        raise ConfigError("the outermost JSON value is not a config: it has no $type")
    return root


def content_hash(root: Config) -> str:
    """A hexadecimal SHA-256 of the text form, the same in every process."""
    return hashlib.sha256(text(root).encode(errors="surrogatepass")).hexdigest()


def _write(value: object, path: str) -> object:
    if isinstance(value, Config):
        return {"$type": type_name(type(value)), **{name: _write(v, join(path, name)) for name, v in fields(value)}}
    if isinstance(value, Mapping):
        return {"$map": [[_write(key, path), _write(item, join(path, key))] for key, item in value.items()]}
    if isinstance(value, tuple) and codec.codec_of(value) is None:
        return [_write(item, join(path, index)) for index, item in enumerate(value)]
    try:
        return codec.write(value)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(data: Any, path: str) -> Any:  # Any: arbitrary JSON
    if isinstance(data, list):
        return tuple(_read(item, join(path, index)) for index, item in enumerate(data))
    if not isinstance(data, dict):
        return data
    try:
        if "$type" in data:
            return _read_node(data, path)
        if set(data) == {"$map"}:
            return FrozenDict({_read(key, path): _read(item, join(path, key)) for key, item in data["$map"]})
        (tag,) = data
        return codec.read(tag, data[tag])
    except _LocatedError:
        raise
    except ConfigError as error:
        raise _LocatedError(f"{path or 'the root'}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise _LocatedError(f"{path or 'the root'}: not a config value: {str(data)[:80]}") from None


def _read_node(data: Mapping[str, Any], path: str) -> Config:
    name, known = data["$type"], known_types()
    if name not in known:
        hint = did_you_mean(str(name), known)
        raise ConfigError(f"{name!r} is not a config type of this process.{hint} Import the module that defines it")
    return known[name](**{key: _read(value, join(path, key)) for key, value in data.items() if key != "$type"})
