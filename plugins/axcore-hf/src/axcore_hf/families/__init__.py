"""The families by `model_type`, from this package and from entry points."""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import entry_points

from axcore.config import AxcoreError, ConfigError, did_you_mean
from axcore_hf.family import Family
from axcore_hf.fields import Fields

GROUP = "axcore_hf.families"
"""Group of entry points that map a `model_type` to a `Family`."""

OWN = {
    "deepseek_v3": "deepseek",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gpt2": "gpt2",
    "gpt_oss": "gpt_oss",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo",
    "phi3": "phi",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
}
"""model_type -> module of this package, imported on demand."""


@functools.cache
def _brought() -> dict[str, str]:
    """model_type -> `package.module:attribute`, from the entry points of other distributions."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def by_type(kind: str) -> Family:
    """The family of a `model_type`. Other distributions take precedence over this package.

    Raises:
        AxcoreError: an entry point does not name a family.
    """
    if kind in _brought():
        target = _brought()[kind]
        module, _, name = target.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:
            raise AxcoreError(f"the family of model_type {kind!r}, {target}, cannot be loaded: {error}") from error
        if not isinstance(found, Family):
            raise AxcoreError(f"the family of model_type {kind!r}, {target}, is a {type(found).__name__}, not a Family")
        return found
    families: tuple[Family, ...] = importlib.import_module(f"{__name__}.{OWN[kind]}").FAMILIES
    return next(family for family in families if kind in family.model_types)


def known() -> list[str]:
    """Every `model_type` that has a family."""
    return sorted({*OWN, *_brought()})


SHARED = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
"""Fields of a multimodal config, outside of its `text_config`, that also apply to the language model."""


def language_part(fields: Fields) -> Fields | None:
    """The fields of the language model in a multimodal model, or None for other configs."""
    nested = fields.raw.get("text_config")
    if not isinstance(nested, dict):
        return None
    kind = nested.get("model_type")
    if kind not in known() or fields.raw.get("model_type") in known():
        return None
    around = {name: fields.raw[name] for name in SHARED if name in fields.raw}
    return Fields({**by_type(kind).defaults, **around, **nested}, f"{fields.where}: text_config")


def family_of(fields: Fields) -> Family:
    """The family that a config belongs to.

    Raises:
        ConfigError: no family supports it. The message lists the fields that the Llama family does not support.
    """
    kind = fields.raw.get("model_type")
    if isinstance(kind, str) and kind in known():
        return by_type(kind)
    message = f"{fields.where}: model_type={kind!r} is not supported.{did_you_mean(str(kind), known())} Known: "
    message += ", ".join(known())
    trial = Fields(fields.raw)
    lacking = ""
    try:
        by_type("llama").model(trial)
    except ConfigError as error:
        lacking = f"; {error}"
    if unknown := sorted(trial.unread()):
        message += f". Fields that the family llama does not support: {', '.join(unknown)}{lacking}"
    raise ConfigError(f"{message}. To add a family, register an entry point in the group {GROUP}.")
