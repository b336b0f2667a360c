"""How the tokens of a request are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from axcore.config import FrozenDict


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the tokens of one request are chosen."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = FrozenDict()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    logprobs: int | None = None
