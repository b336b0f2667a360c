"""Drafts from the tokens of all requests of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import axcore as ax
from axcore.infer.sequences import Sequence
from axcore.infer.speculation import Drafter, Drafts, Target


class Memory(Drafter):
    """Drafts what last followed the last `context` tokens, in any request of the engine."""

    class Config(Drafter.Config):
        context: ax.PositiveInt = 4
        """Number of tokens that must agree."""

    config: Config

    def __init__(self, cfg: Config, target: Target):
        super().__init__(cfg, target)
        self.next_token: dict[tuple[int, ...], int] = {}

    def propose(self, sequences: Iterable[Sequence], seeds: Mapping[int, tuple[int, int]]) -> Drafts:
        """See `Drafter.propose`."""
        given = list(sequences)
        for each in given:
            self.remember(each)
        return {each.id: self.continuation(each.tokens) for each in given}

    def remember(self, sequence: Sequence) -> None:
        """Stores what followed each group of tokens: of the whole prompt once, then of the tokens of the last step."""
        tokens, size = sequence.tokens, self.config.context
        new = 1 + self.config.num_speculative_tokens
        first = size if sequence.num_output <= new else len(tokens) - new
        for at in range(max(first, size), len(tokens)):
            self.next_token[tuple(tokens[at - size : at])] = tokens[at]

    def continuation(self, tokens: list[int]) -> tuple[int, ...]:
        """Up to `num_speculative_tokens` tokens after the last of some tokens."""
        cfg, row = self.config, tokens[-self.config.context :]
        while len(row) < cfg.context + cfg.num_speculative_tokens:
            found = self.next_token.get(tuple(row[-cfg.context :]))
            if found is None:
                break
            row.append(found)
        return tuple(row[cfg.context :])
