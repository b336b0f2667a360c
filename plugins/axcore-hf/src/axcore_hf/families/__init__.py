"""The families, by `model_type`. A family is one entry of one of these modules."""

from __future__ import annotations

from axcore.config import ConfigError, did_you_mean
from axcore_hf.families import deepseek, gemma, gpt2, gpt_oss, llama, olmo, phi, qwen
from axcore_hf.family import Family
from axcore_hf.fields import Fields

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *qwen.FAMILIES,
    *gemma.FAMILIES,
    *phi.FAMILIES,
    *olmo.FAMILIES,
    *deepseek.FAMILIES,
    *gpt_oss.FAMILIES,
    *gpt2.FAMILIES,
)
BY_TYPE: dict[str, Family] = {kind: family for family in FAMILIES for kind in family.model_types}


def family_of(fields: Fields) -> Family:
    """The family that a config belongs to.

    Raises:
        ConfigError: there is none; it says which of its fields the likest family does not know.
    """
    kind = fields.raw.get("model_type")
    if kind in BY_TYPE:
        return BY_TYPE[str(kind)]
    message = f"{fields.where}: model_type={kind!r} is not supported.{did_you_mean(str(kind), BY_TYPE)} Known: "
    message += ", ".join(sorted(BY_TYPE))
    like = BY_TYPE["llama"]
    trial = Fields(fields.raw)
    lacking = ""
    try:
        like.model(trial)
    except ConfigError as error:
        lacking = f"; {error}"
    if unknown := sorted(trial.unread()):
        message += f". Beside a llama it has: {', '.join(unknown)}{lacking}"
    raise ConfigError(message)
