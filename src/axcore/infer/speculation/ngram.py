"""Drafts from the tokens of the sequence itself."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from axcore.config import ConfigError, PositiveInt
from axcore.infer.sequences import Sequence
from axcore.infer.speculation.drafter import Drafter, Drafts, Target


class NGram(Drafter):
    """Drafts what followed the last tokens when they occurred before in the prompt or the output (prompt lookup).

    It costs no memory and no computation on the device. It suits outputs that repeat their prompt, such as summaries,
    edits of code and answers from documents.
    """

    class Config(Drafter.Config):
        prompt_lookup_max: PositiveInt = 4
        """The largest number of last tokens to look up. The longest that occurred before are used."""
        prompt_lookup_min: PositiveInt = 2
        """The smallest number of last tokens to look up."""

    config: Config

    def __init__(self, cfg: Config, target: Target):
        super().__init__(cfg, target)
        if cfg.prompt_lookup_min > cfg.prompt_lookup_max:
            raise ConfigError(
                f"engine.speculation.prompt_lookup_min={cfg.prompt_lookup_min} must be at most "
                f"prompt_lookup_max={cfg.prompt_lookup_max}. Reduce prompt_lookup_min"
            )

    def propose(self, sequences: Iterable[Sequence], seeds: Mapping[int, tuple[int, int]]) -> Drafts:
        """See `Drafter`."""
        return {each.id: self.continuation(each.tokens) for each in sequences}

    def continuation(self, tokens: list[int]) -> tuple[int, ...]:
        """What followed the last occurrence of the last tokens. Where it ends, it repeats."""
        cfg = self.config
        whole = array("i", tokens)
        for length in range(min(cfg.prompt_lookup_max, len(tokens) - 1), cfg.prompt_lookup_min - 1, -1):
            at = _last_occurrence(whole, length)
            if at is not None:
                row = list(tokens)
                for source in range(at + length, at + length + cfg.num_speculative_tokens):
                    row.append(row[source])
                return tuple(row[len(tokens) :])
        return ()


def _last_occurrence(tokens: array[int], length: int) -> int | None:
    """Where the last `length` tokens occur before their end; None: nowhere. A search over bytes takes about 10 us for
    10,000 tokens."""
    size = tokens.itemsize
    row = tokens.tobytes()
    wanted, end = row[-length * size :], len(row) - size
    while (at := row.rfind(wanted, 0, end)) >= 0:
        if at % size == 0:
            return at // size
        end = at + len(wanted) - 1
    return None
