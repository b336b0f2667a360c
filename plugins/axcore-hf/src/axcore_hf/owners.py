"""Which distributions have a family for each `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

DISTRIBUTION = "axcore-hf"
GROUP = "axcore_hf.families"
"""Group of entry points that map a `model_type` to a `Family`."""

OWN: Mapping[str, str] = {
    "cohere": "cohere",
    "cohere2": "cohere",
    "deepseek_v3": "deepseek",
    "exaone4": "exaone",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "glm": "glm",
    "glm4": "glm",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "granite": "granite",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "nemotron": "nemotron",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "olmoe": "olmo",
    "phi": "phi",
    "phi3": "phi",
    "qwen2": "qwen",
    "qwen2_moe": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "seed_oss": "seed_oss",
    "smollm3": "smollm",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""model_type -> module in `axcore_hf.families`, imported on demand."""


def owners() -> dict[str, dict[str, str]]:
    """model_type -> distribution -> where it has the family.

    This is a module in `axcore_hf.families`, or `package.module:attribute` for the entry points of other distributions.
    """
    found = {kind: {DISTRIBUTION: module} for kind, module in OWN.items()}
    for point in entry_points(group=GROUP):
        name = point.dist.name if point.dist is not None else point.value
        found.setdefault(point.name, {})[name] = point.value
    return found
