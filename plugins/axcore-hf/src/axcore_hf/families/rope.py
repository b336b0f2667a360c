"""RoPE as published configs describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from axcore.config import ConfigError, did_you_mean
from axcore_hf.fields import Fields
from axcore_rope.published import from_rope_parameters

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
ORIGINAL = "original_max_position_embeddings"
WITH_ORIGINAL = ("yarn", "llama3", "longrope", "su")
"""RoPE types that the field `original_max_position_embeddings` of the config itself applies to."""
LAYER_TYPES = ("sliding_attention", "full_attention")

ROPE = {"rope_theta": 10_000.0, "rope_parameters": None, "rope_scaling": None, ORIGINAL: None}
"""The defaults of the fields that `rope` reads."""


def head_dim(fields: Fields) -> int:
    given = fields("head_dim")
    return int(fields("hidden_size") // fields("num_attention_heads") if given is None else given)


def rope(
    fields: Fields,
    *,
    types: Sequence[str] = ROPE_TYPES,
    otherwise: Mapping[str, Any] = MappingProxyType({}),
    theta: float | None = None,
    partial_rotary_factor: float | None = None,
    **more: Any,
) -> Any:
    """The position embedding.

    Args:
        types: the values of `rope_type` that the family supports.
        otherwise: the parameters of configs that have none.
        theta, partial_rotary_factor: values for parameters that lack them. None uses the fields of the same name
            (`rope_theta`).
        more: arguments of `from_rope_parameters`.
    """
    given, older = fields.optional("rope_parameters"), fields.optional("rope_scaling")
    parameters = dict(older or (otherwise if given is None else given))
    parameters.setdefault("rope_theta", fields.optional("rope_theta") if theta is None else theta)
    fraction = fields.optional("partial_rotary_factor") if partial_rotary_factor is None else partial_rotary_factor
    if fraction is not None:
        parameters.setdefault("partial_rotary_factor", fraction)
    original = fields.optional(ORIGINAL)
    if original is not None and rope_type(parameters) in WITH_ORIGINAL:
        parameters[ORIGINAL] = original
    return rotary(fields, parameters, types=types, **more)


def rotary(fields: Fields, parameters: Mapping[str, Any], *, types: Sequence[str] = ROPE_TYPES, **more: Any) -> Any:
    """The position embedding with these `rope_parameters`, which include the theta."""
    kind, where = rope_type(parameters), fields.where
    if kind not in types:
        near = did_you_mean(str(kind), types)
        raise ConfigError(f"{where}: rope_type={kind!r} is not supported.{near} Known: {', '.join(types)}.")
    if kind == "yarn" and "factor" not in parameters:
        raise ConfigError(f"{where}: rope_type='yarn' requires factor")
    if kind in WITH_ORIGINAL and ORIGINAL in parameters and parameters[ORIGINAL] is None:
        raise ConfigError(f"{where}: {ORIGINAL} of rope_type={kind!r} must not be null")
    fraction = parameters.get("partial_rotary_factor")
    if "partial_rotary_factor" in fields.no_effect and fraction is not None:
        if kind != "default" and fraction != 1:
            raise ConfigError(f"{where}: partial_rotary_factor={fraction!r} is not supported with rope_type={kind!r}")
        parameters = {**parameters, "partial_rotary_factor": None}
    if "head_dim" not in more:
        more["head_dim"] = head_dim(fields)
    try:
        return from_rope_parameters(
            parameters, max_position_embeddings=fields.optional("max_position_embeddings"), **more
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def by_layer_type(fields: Fields, local_theta: float) -> dict[bool, Any]:
    """RoPE of layers with a window (True) and without one (False), which have parameters of their own.

    Before version 5, `transformers` wrote `rope_theta` and `rope_scaling`, which apply to layers without a window.

    Args:
        local_theta: the theta of layers with a window whose parameters lack it.
    """
    parameters = dict(fields.optional("rope_parameters") or {})
    local, everywhere = (dict(parameters.pop(kind, None) or {"rope_type": "default"}) for kind in LAYER_TYPES)
    everywhere.update(fields.optional("rope_scaling") or {})
    everywhere.setdefault("rope_theta", fields("rope_theta"))
    local.setdefault("rope_theta", local_theta)
    if not parameters.items() <= {"rope_type": "default", "rope_theta": everywhere["rope_theta"]}.items():
        raise ConfigError(
            f"{fields.where}: rope_parameters={parameters!r} must be inside the entries {' and '.join(LAYER_TYPES)}, "
            f"since transformers ignores them elsewhere"
        )
    for entry in (local, everywhere):
        if rope_type(entry) == "yarn" and entry.get("truncate") not in (None, True):
            raise ConfigError(
                f"{fields.where}: truncate={entry['truncate']!r} in rope_parameters is not supported, since "
                f"transformers ignores it inside the entry of a layer type. Remove it."
            )
    fraction = {"partial_rotary_factor": fields.optional("partial_rotary_factor")}
    return {is_local: rotary(fields, fraction | entry) for is_local, entry in ((True, local), (False, everywhere))}


def rope_type(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))
