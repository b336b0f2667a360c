"""RoPE in the form of published configs: the `rope_parameters` (formerly `rope_scaling`) of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import axcore as ax
from axcore.config import did_you_mean
from axcore_rope.rotary import Layout, Rotary
from axcore_rope.scaling import DynamicNTK, Linear, Llama3, LongRoPE, Scaling, YaRN, is_positive

Fields = dict[str, Any]

ORIGINAL = "original_max_position_embeddings"
OF_ROTARY = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Fields that any `rope_type` may have. They describe the rotation rather than its scaling."""


class Kind(NamedTuple):
    """The format of one `rope_type`."""

    scaling: type[Scaling] | None
    fields: Mapping[str, str] = {}
    """Published field name -> axcore's field name."""
    optional: tuple[str, ...] = ()
    by_ratio: bool = False
    """Whether a missing factor defaults to max_position_embeddings over the original length."""


SAME = {"factor": "factor", ORIGINAL: "original_max"}
YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor")
KINDS: dict[str, Kind] = {
    "default": Kind(None),
    "mrope": Kind(None),
    "linear": Kind(Linear, {"factor": "factor"}),
    "dynamic": Kind(DynamicNTK, SAME),
    "yarn": Kind(
        YaRN,
        {
            **SAME,
            **{name: name for name in YARN},
        },
        optional=YARN,
        by_ratio=True,
    ),
    "llama3": Kind(Llama3, {**SAME, "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}),
    "longrope": Kind(
        LongRoPE,
        {**SAME, "short_factor": "short", "long_factor": "long", "attention_factor": "attention_factor"},
        optional=("attention_factor",),
        by_ratio=True,
    ),
}
ALIASES = {"su": "longrope"}  # used in early checkpoints


def scaling_of(parameters: Mapping[str, Any]) -> Scaling | None:
    """The scaling that a published dictionary describes. The dictionary must not contain anything else.

    Raises:
        ConfigError: the `rope_type` is unknown, or a field is missing, unknown or unrelated to the scaling.
    """
    if placed := [name for name in OF_ROTARY if parameters.get(name) is not None]:
        raise ax.ConfigError(
            f"{', '.join(placed)} would be ignored in a scaling. Set theta, rotary_dim and sections separately, or "
            f"read the whole dictionary with axcore_rope.published.from_rope_parameters."
        )
    return _scaling(dict(parameters), None)


def from_rope_parameters(
    parameters: Mapping[str, Any] | None,
    *,
    head_dim: int,
    theta: float | None = None,
    max_position_embeddings: int | None = None,
    partial_rotary_factor: float | None = None,
    layout: Layout = "half",
) -> Rotary.Config:
    """The layer that a published dictionary describes.

    Args:
        parameters: `rope_parameters`, or `rope_scaling` of older configs. None means no scaling.
        head_dim: features of a head.
        theta, partial_rotary_factor: values for older dictionaries, which lack them.
        max_position_embeddings: the field of the config, used as original length if the dictionary has none.

    Raises:
        ConfigError: the `rope_type` is unknown, a field is missing or unknown, or there is no theta.
    """
    fields = dict(parameters or {})
    if kinds := [name for name, value in fields.items() if isinstance(value, Mapping)]:
        raise ax.ConfigError(
            f"rope_parameters differ between layer types. Pass the entry of one type: {', '.join(kinds)}."
        )
    theta = _first(fields.get("rope_theta"), theta)
    if theta is None:
        raise ax.ConfigError("neither rope_parameters nor the config has rope_theta")
    fraction = _first(fields.get("partial_rotary_factor"), partial_rotary_factor, 1.0)
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", fraction)):
        if not is_positive(value):
            raise ax.ConfigError(f"{name} must be positive, not {value!r}")
    sections = fields.get("mrope_section")
    return Rotary.Config(
        theta=theta,
        layout=layout,
        rotary_dim=None if fraction == 1 else int(head_dim * fraction),
        scaling=_scaling(fields, max_position_embeddings),
        sections=None if sections is None else tuple(sections),
        interleave_sections=bool(fields.get("mrope_interleaved", False)),
    )


def to_rope_parameters(rotary: Rotary.Config, head_dim: int) -> Fields:
    """The published dictionary that describes a layer: the inverse of `from_rope_parameters`, apart from `layout`.

    Raises:
        ConfigError: no `rope_type` describes the scaling.
    """
    found: Fields = {"rope_type": "default", "rope_theta": rotary.theta}
    if rotary.rotary_dim not in (None, head_dim):
        found["partial_rotary_factor"] = rotary.rotary_dim / head_dim
    if rotary.sections is not None:
        found |= {"mrope_section": list(rotary.sections), "mrope_interleaved": rotary.interleave_sections}
    if rotary.scaling is None:
        return found
    name = next((name for name, kind in KINDS.items() if kind.scaling is type(rotary.scaling)), None)
    if name is None:
        raise ax.ConfigError(f"no rope_type describes scaling={rotary.scaling!r}")
    values = {theirs: getattr(rotary.scaling, ours) for theirs, ours in KINDS[name].fields.items()}
    values = {theirs: list(value) if isinstance(value, tuple) else value for theirs, value in values.items()}
    return {**found, "rope_type": name, **{theirs: value for theirs, value in values.items() if value is not None}}


def _scaling(fields: Fields, length: int | None) -> Scaling | None:
    """Args: length: `max_position_embeddings`, if known."""
    name = _first(fields.get("rope_type"), fields.get("type"), "default")
    name = ALIASES.get(name, name)
    if name not in KINDS:
        raise ax.ConfigError(f"rope_type={name!r} is not known.{did_you_mean(name, KINDS)} Known: {', '.join(KINDS)}")
    kind = KINDS[name]
    if name == "mrope" and fields.get("mrope_section") is None:
        raise ax.ConfigError("rope_type='mrope' requires mrope_section")
    given: Fields = {
        field: tuple(value) if isinstance(value, list) else value
        for field, value in fields.items()
        if value is not None and field not in (*OF_ROTARY, "rope_type", "type")
    }
    if unknown := [field for field in given if field not in kind.fields]:
        raise ax.ConfigError(
            f"rope_type={name!r} has no field {', '.join(unknown)}.{did_you_mean(unknown[0], kind.fields)}"
        )
    if kind.scaling is DynamicNTK and length is not None and given.get(ORIGINAL, length) != length:
        raise ax.ConfigError(
            f"rope_type='dynamic' has {ORIGINAL}={given[ORIGINAL]} and max_position_embeddings={length}; transformers "
            f"uses the latter. Remove the former, or make them equal."
        )
    if length is not None and ORIGINAL in kind.fields:
        given.setdefault(ORIGINAL, length)
        if kind.by_ratio:
            given.setdefault("factor", length / given[ORIGINAL])
    if missing := [field for field in kind.fields if field not in given and field not in kind.optional]:
        raise ax.ConfigError(f"rope_type={name!r} requires {', '.join(missing)}")
    if kind.scaling is None:
        return None
    return kind.scaling(**{kind.fields[field]: value for field, value in given.items()})


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
