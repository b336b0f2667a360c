"""Which distribution brings the family of each `model_type`. Imports neither jax nor flax."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from axcore.config import AxcoreError

GROUP = "axcore_hf.families"
"""Group of entry points that map a `model_type` to a `Family`."""

OWN: Mapping[str, str] = {
    "deepseek_v3": "deepseek",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo",
    "olmoe": "olmo",
    "phi": "phi",
    "phi3": "phi",
    "qwen2": "qwen",
    "qwen2_moe": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "starcoder2": "starcoder2",
}
"""model_type -> module in `axcore_hf.families`, imported on demand."""


def brought() -> dict[str, str]:
    """model_type -> `package.module:attribute`, from the entry points of other distributions.

    Raises:
        AxcoreError: a `model_type` has two owners.
    """
    found: dict[str, str] = {}
    owners = dict.fromkeys(OWN, "axcore-hf")
    for point in entry_points(group=GROUP):
        name = point.dist.name if point.dist is not None else point.value
        if point.name in owners:
            raise AxcoreError(
                f"model_type {point.name!r} has a family in {owners[point.name]} and in {name} (entry points "
                f"{GROUP}). Uninstall one of them."
            )
        owners[point.name], found[point.name] = name, point.value
    return found
