"""The families by `model_type`, from this package and from entry points, and the language part of other configs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator

from axcore.config import AxcoreError, ConfigError, did_you_mean
from axcore.plugin.attribution import described
from axcore_hf.family import Family
from axcore_hf.fields import Fields
from axcore_hf.owners import DISTRIBUTION, GROUP, OWN, owners

_owners = functools.cache(owners)


def by_type(kind: str) -> Family:
    """The family of a `model_type`.

    Raises:
        AxcoreError: several distributions have one, or an entry point does not name a family.
    """
    found = _owners()[kind]
    if len(found) > 1:
        raise AxcoreError(
            f"model_type {kind!r} has a family in {' and in '.join(sorted(found))} (entry points {GROUP}). "
            f"Uninstall all but one of them."
        )
    ((distribution, target),) = found.items()
    if distribution == DISTRIBUTION:
        return _shipped(kind)
    module, _, name = target.partition(":")
    try:
        family = getattr(importlib.import_module(module), name)
    except Exception as error:
        reason = described(error)
        raise AxcoreError(f"the family of model_type {kind!r}, {target}, cannot be loaded: {reason}") from error
    if not isinstance(family, Family):
        raise AxcoreError(f"the family of model_type {kind!r}, {target}, is a {type(family).__name__}, not a Family")
    return family


def _shipped(kind: str) -> Family:
    families: tuple[Family, ...] = importlib.import_module(f"{__name__}.{OWN[kind]}").FAMILIES
    return next(family for family in families if kind in family.model_types)


def known() -> list[str]:
    """Every `model_type` that has a family."""
    return sorted(_owners())


def problems() -> Iterator[str]:
    """What is wrong with the families of other distributions, for `axcore doctor`."""
    for kind, found in sorted(_owners().items()):
        if found.keys() != {DISTRIBUTION}:
            try:
                by_type(kind)
            except AxcoreError as error:
                yield str(error)


MULTIMODAL = {
    "aya_vision": True,
    "cohere2_vision": True,
    "gemma3": True,
    "internvl": True,
    "llava": False,
    "llava_next": False,
    "llava_onevision": False,
    "mistral3": True,
    "vipllava": False,
}
"""Multimodal models whose `text_config` alone describes what their language model computes for text, and the default of
their `tie_word_embeddings`."""
TIED_EITHER_WAY = ("llava", "llava_onevision")
"""Multimodal models that are also tied if only their `text_config` says so."""
OWN_HEAD = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Fields of a `text_config` that multimodal models ignore, since they have a head of their own, and the values without
effect."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of a multimodal config that its `text_config` may lack."""


def language_part(fields: Fields) -> Fields | None:
    """The fields of the language model in a multimodal model, or None for other configs.

    Raises:
        ConfigError: the `text_config` is not an object.
    """
    outer = fields.raw.get("model_type")
    if not isinstance(outer, str) or outer not in MULTIMODAL:
        return None
    nested = fields.raw.get("text_config")
    if not isinstance(nested, dict):
        raise ConfigError(f"{fields.where}: model_type={outer!r} requires text_config to be an object, not {nested!r}")
    tied = fields.raw.get("tie_word_embeddings", MULTIMODAL[outer])
    if not tied and outer in TIED_EITHER_WAY:
        tied = nested.get("tie_word_embeddings", tied)
    around = {name: fields.raw[name] for name in IDS if name in fields.raw}
    part = Fields({**around, **nested, "tie_word_embeddings": tied}, f"{fields.where}: text_config")
    declared = family_of(part).defaults
    part.raw |= {name: value for name, value in OWN_HEAD.items() if name in declared}
    return part


def family_of(fields: Fields) -> Family:
    """The family that a config belongs to.

    Raises:
        ConfigError: no family supports it. The message lists the fields that the Llama family does not have or ignores.
    """
    kind = fields.raw.get("model_type")
    if kind not in known():
        _owners.cache_clear()  # a family may have been installed since
    if isinstance(kind, str) and kind in known():
        return by_type(kind)
    near = did_you_mean(kind, known()) if isinstance(kind, str) else " It must be a string."
    message = f"{fields.where}: model_type={kind!r} is not supported.{near} Known: "
    message += ", ".join([*known(), *MULTIMODAL])
    if "text_config" not in fields.raw:
        llama = _shipped("llama")
        others = [name for name in fields.raw if not llama.declares(name)]
        ignored = [name for name in fields.raw if name in llama.no_effect]
        for what, names in (("does not have", others), ("ignores", ignored)):
            if names:
                listed = ", ".join(f"{name}={fields.raw[name]!r}" for name in sorted(names))
                message += f". Fields that the family llama {what}: {listed}"
        message += ". Its layers may also differ in ways that config.json does not describe"
    raise ConfigError(f"{message}. To add a family, register an entry point in the group {GROUP}.")
