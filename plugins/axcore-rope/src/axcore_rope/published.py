"""RoPE as published configs write it: the `rope_parameters` (formerly `rope_scaling`) of `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import axcore as ax
from axcore.config import did_you_mean
from axcore_rope.rotary import Rotary
from axcore_rope.scaling import DynamicNTK, Linear, Llama3, LongRoPE, Scaling, YaRN

Fields = dict[str, Any]

COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def _yarn(fields: Fields, length: int | None) -> YaRN:
    original = fields["original_max_position_embeddings"]
    given = {name: fields[name] for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if fields.get(name)}
    return YaRN(
        factor=_factor(fields, original, length),
        original_max=original,
        truncate=fields.get("truncate", True),
        attention=fields.get("attention_factor"),
        **{name: float(value) for name, value in given.items()},
    )


def _longrope(fields: Fields, length: int | None) -> LongRoPE:
    original = fields["original_max_position_embeddings"]
    return LongRoPE(
        short=tuple(map(float, fields["short_factor"])),
        long=tuple(map(float, fields["long_factor"])),
        original_max=original,
        factor=_factor(fields, original, length),
        attention=fields.get("attention_factor"),
    )


def _factor(fields: Fields, original: int, length: int | None) -> float:
    """How much longer rows may become than those of the training."""
    if fields.get("factor") is not None:
        return float(fields["factor"])
    if length is None:
        raise ax.ConfigError(
            f"rope_type={fields.get('rope_type')!r} gives no factor, and max_position_embeddings is unknown"
        )
    return length / original


def _dynamic(fields: Fields, length: int | None) -> DynamicNTK:
    original = fields.get("original_max_position_embeddings") or length
    if original is None:
        raise ax.ConfigError("rope_type='dynamic' needs original_max_position_embeddings or max_position_embeddings")
    return DynamicNTK(factor=float(fields["factor"]), original_max=original)


def _llama3(fields: Fields, length: int | None) -> Llama3:
    return Llama3(
        factor=float(fields["factor"]),
        original_max=fields["original_max_position_embeddings"],
        low_freq_factor=float(fields["low_freq_factor"]),
        high_freq_factor=float(fields["high_freq_factor"]),
    )


Reader = Callable[[Fields, int | None], Scaling | None]

ORIGINAL = "original_max_position_embeddings"
READERS: dict[str, tuple[Reader, tuple[str, ...], tuple[str, ...]]] = {
    "default": (lambda fields, length: None, (), ()),
    "mrope": (lambda fields, length: None, ("mrope_section",), ()),
    "linear": (lambda fields, length: Linear(factor=float(fields["factor"])), ("factor",), (ORIGINAL,)),
    "dynamic": (_dynamic, ("factor",), (ORIGINAL,)),
    "yarn": (
        _yarn,
        (ORIGINAL,),
        ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"),
    ),
    "llama3": (_llama3, ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"), ()),
    "longrope": (_longrope, ("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor")),
}
"""rope_type -> (reader, fields that it needs, fields that it may have)."""


def scaling_of(parameters: Mapping[str, Any] | None, max_position_embeddings: int | None = None) -> Scaling | None:
    """The scaling that a published dictionary describes.

    Raises:
        ConfigError: an unknown `rope_type`, a field that it lacks, or one that it does not know.
    """
    if parameters is None:
        return None
    fields = dict(parameters)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its name in early checkpoints
    if kind not in READERS:
        raise ax.ConfigError(
            f"rope_type={kind!r} is not known.{did_you_mean(kind, READERS)} Known: {', '.join(READERS)}"
        )
    reader, needed, optional = READERS[kind]
    if missing := [name for name in needed if fields.get(name) is None]:
        raise ax.ConfigError(f"rope_type={kind!r} needs {', '.join(missing)}")
    if unknown := [
        name for name, value in fields.items() if value is not None and name not in (*COMMON, *needed, *optional)
    ]:
        raise ax.ConfigError(
            f"rope_type={kind!r} has no field {', '.join(unknown)}.{did_you_mean(unknown[0], (*needed, *optional))}"
        )
    return reader(fields, max_position_embeddings)


def from_rope_parameters(
    parameters: Mapping[str, Any] | None,
    *,
    head_dim: int,
    theta: float | None = None,
    max_position_embeddings: int | None = None,
    partial_rotary_factor: float | None = None,
    layout: Any = "half",
) -> Rotary.Config:
    """The layer that a published dictionary describes.

    Args:
        parameters: `rope_parameters`, or `rope_scaling` of older configs; None: no scaling.
        head_dim: features of a head.
        theta, partial_rotary_factor: for dictionaries without them, as older ones.
        max_position_embeddings: of the config, which some types refer to.

    Raises:
        ConfigError: see `scaling_of`; or no theta.
    """
    fields = dict(parameters or {})
    theta = fields.get("rope_theta") or theta
    if theta is None:
        raise ax.ConfigError("neither rope_parameters nor the config gives rope_theta")
    fraction = fields.get("partial_rotary_factor") or partial_rotary_factor or 1.0
    sections = fields.get("mrope_section")
    return Rotary.Config(
        theta=float(theta),
        layout=layout,
        rotary_dim=None if fraction == 1 else int(head_dim * fraction),
        scaling=scaling_of(parameters, max_position_embeddings),
        sections=None if sections is None else tuple(sections),
        interleave_sections=bool(fields.get("mrope_interleaved", False)),
    )
