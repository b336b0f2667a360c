"""Overrides from the command line: `path=value`. The annotation of the field determines how the value is parsed."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from axcore.config.codec import named_function
from axcore.config.errors import ConfigError
from axcore.config.history import acting
from axcore.config.node import Config, field_names, has_field, shown_type
from axcore.config.tree import get, no_such_path, parts, put
from axcore.config.types import arms_of, conforms, describe, hints, parse, required, takes_function


def override[C: Config](cfg: C, assignments: Iterable[str]) -> C:
    """Applies each `path=value` in order.

    Raises:
        ConfigError: An assignment has no `=`, its path is unknown, or its value has the wrong type.
    """
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set requires path=value, not {assignment!r}")
        with acting(f"--set {assignment}"):
            path = path.strip()
            cfg = _assign(_with_values(cfg, path), path, value.strip())
    return cfg


def _with_values[C: Config](cfg: C, path: str) -> C:
    """The tree in which each empty field above `path` holds the plain value that its annotation names, as in
    `model.dtypes.compute`. An empty slot stays empty, since several classes may fill it."""
    names = path.split(".")
    for cut in range(1, len(names)):
        above, name = ".".join(names[: cut - 1]), names[cut - 1]
        try:
            node = get(cfg, above)
        except ConfigError:
            break
        if isinstance(node, Config) and has_field(node, name) and getattr(node, name) is None:
            kind = _value_kind(hints(type(node))[name])
            if kind is not None:
                cfg = put(cfg, above, node.set(**{name: kind()}))
    return cfg


def _value_kind(hint: object) -> type[Config] | None:
    """The plain value that an annotation names, as `DTypes` in `DTypes | None`."""
    kinds = [arm for arm in arms_of(hint) if isinstance(arm, type) and issubclass(arm, Config)]
    return kinds[0] if len(kinds) == 1 and kinds[0].target is None else None


def _assign[C: Config](cfg: C, path: str, value: str) -> C:
    owner_path, inside = _owner(cfg, path)
    owner = get(cfg, owner_path)
    name, *below = inside
    hint = functools.reduce(_item_hint, below, hints(type(owner)).get(name, Any))
    held = functools.reduce(lambda value, key: dict(parts(value)).get(key), below, getattr(owner, name))
    kind = type(held) if isinstance(held, Config) else _value_kind(hint)
    if kind is not None and value.lower() != "none":
        raise ConfigError(
            f"{path} is a node ({shown_type(kind)}). Set one of its fields, as in {path}.FIELD=VALUE: "
            f"{', '.join(field_names(kind))}"
        )
    try:
        parsed = named_function(value) if takes_function(hint) and value.lower() != "none" else parse(value, hint)
    except ConfigError as error:
        raise ConfigError(f"{path} must be {describe(hint)}, not {value!r}: {error}") from None
    except ValueError:
        raise ConfigError(f"{path} must be {describe(hint)}, not {value!r}") from None
    if not conforms(parsed, hint):
        raise ConfigError(f"{path} must be {required(parsed, hint)}, not {value}")
    new = put(getattr(owner, name), ".".join(below), parsed) if below else parsed
    return put(cfg, owner_path, owner.set(**{name: new}))


def _owner(cfg: Config, path: str) -> tuple[str, list[str]]:
    """The path of the innermost node above `path`, and the segments from there: a field, then indices or keys.

    Raises:
        ConfigError: The path does not exist. A new key of a mapping is allowed.
    """
    names = path.split(".")
    if not all(names):
        raise no_such_path(cfg, path)
    for cut in range(len(names) - 1, -1, -1):
        try:
            node = get(cfg, ".".join(names[:cut]))
        except ConfigError:
            continue
        if not isinstance(node, Config):
            continue
        if has_field(node, names[cut]):
            holder = get(cfg, ".".join(names[:-1]))
            if cut == len(names) - 1 or isinstance(holder, Mapping) or names[-1] in dict(parts(holder)):
                return ".".join(names[:cut]), names[cut:]
        break
    raise no_such_path(cfg, path)


def _item_hint(hint: object, key: str) -> object:
    """The annotation of one item of a tuple or mapping that is declared as `hint`."""
    for arm in arms_of(hint):
        origin, args = typing.get_origin(arm), typing.get_args(arm)
        if origin is tuple and args:
            return args[0] if args[-1] is Ellipsis else args[int(key)] if int(key) < len(args) else Any
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return args[-1]
    return Any
