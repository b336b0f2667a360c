"""The size of the decoding state of an engine, and of its steps."""

from __future__ import annotations

import dataclasses

from axcore.config import ConfigError


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """The size of the decoding state and of a step.

    Attributes:
        max_rows: the number of sequences that run at the same time.
        max_len: the maximum number of tokens of a sequence, prompt and output together.
        step_tokens: the maximum number of prompt tokens of a step. The last tokens of sequences that decode come in
            addition. More tokens make prompts faster and the time between tokens of other sequences longer.
        burst_tokens: the maximum number of prompt tokens of a step during a burst of prompts, which no sequence that
            decodes is part of. A burst begins when the sequences that have a row, or could get a free one, have more
            than `2 * burst_tokens` prompt tokens to compute, and ends when they have at most `step_tokens`. None:
            `step_tokens` always applies.
        watermark: the share of the pages that admission leaves to the growth of running sequences.
        chunk_multiple: a chunk of a prompt takes up a multiple of this number of the tokens of a step.
        recompute_above: lengths above which the keys of a row differ from those of a shorter row. The first chunk of a
            longer row passes them, and a row that passes one is computed again.
    """

    max_rows: int
    max_len: int
    step_tokens: int
    burst_tokens: int | None = None
    watermark: float = 0.01
    chunk_multiple: int = 1
    recompute_above: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("max_rows", 1), ("max_len", 2), ("step_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"engine.{name} must be at least {least}, not {getattr(self, name)}. Raise {name}")
        if self.burst_tokens is not None and self.burst_tokens <= self.step_tokens:
            raise ConfigError(
                f"engine.burst_tokens={self.burst_tokens} must exceed engine.step_tokens={self.step_tokens}. Raise it, "
                f"or leave it out"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"limits.watermark must be at least 0 and below 1, not {self.watermark}. Use 0.01")
        least = self.first_chunk(self.max_len)
        if self.step_tokens < least:
            raise ConfigError(
                f"engine.step_tokens={self.step_tokens}: the keys of a row change when it passes {least - 1} tokens, "
                f"which are then computed in one step. Set step_tokens to at least {least}, or max_len to at most "
                f"{least - 1}"
            )

    def first_chunk(self, length: int) -> int:
        """The least number of tokens that the first chunk of a row of this length must have."""
        return max((limit + 1 for limit in self.recompute_above if limit < length), default=0)
