"""Recognizes names that refer to a feature."""

from __future__ import annotations

import functools
import re

FEATURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "RoPE": (("rope",), ("rotary",), ("rotate", "half"), ("freqs", "cis"), ("roformer",)),
    "MoE": (("moe",), ("expert",), ("experts",), ("mixture", "of", "experts")),
}
"""Feature -> sequences of words in names that refer to it."""

_FIRST = re.compile("|".join(sequence[0] for feature in FEATURES.values() for sequence in feature), re.IGNORECASE)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def may_speak(text: str) -> bool:
    """Whether a text may contain a name that refers to any feature. A fast filter for most modules and names."""
    return _FIRST.search(text) is not None


@functools.cache
def words(name: str) -> tuple[str, ...]:
    """`apply_rotary_pos_emb` -> apply, rotary, pos, emb; `Qwen2MoeMLP` -> qwen, 2, moe, mlp."""
    spelled = name.replace("RoPE", "Rope").replace("RoFormer", "Roformer").replace("MoE", "Moe")
    return tuple(word.lower() for word in _WORD.findall(spelled))


def speaks(name: str, feature: str, model: str = "") -> bool:
    """Whether a name refers to a feature. The model's own name does not count: `Qwen2MoeAttention` in qwen2_moe."""
    return _speaks(words(name), FEATURES[feature], words(model))


@functools.cache
def _speaks(said: tuple[str, ...], wanted: tuple[tuple[str, ...], ...], own: tuple[str, ...]) -> bool:
    at = _find(said, own) if own else None
    rest = said if at is None else (*said[:at], "", *said[at + len(own) :])  # words on either side stay separate
    return any(_find(rest, each) is not None for each in wanted)


def _find(said: tuple[str, ...], wanted: tuple[str, ...]) -> int | None:
    length = len(wanted)
    return next((at for at in range(len(said) - length + 1) if said[at : at + length] == wanted), None)
