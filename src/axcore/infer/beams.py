"""Beam search: the most likely outputs of a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from axcore.config import FiniteFloat, NonNegativeInt, PositiveInt
from axcore.infer.requests import FinishReason, Piece, Request, SamplingOptions, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """How a beam search runs and ranks outputs, with the names and meanings of transformers.

    The score of an output is the sum of the log-probabilities of its tokens, an EOS token included, divided by
    `length ** length_penalty`.

    Attributes:
        max_tokens: the maximum number of output tokens.
        num_beams: the number of unfinished outputs that each step keeps, and of outputs that are returned.
        length_penalty: the exponent of the length in scores; more than 0 favours long outputs.
        early_stopping: when a search with `num_beams` finished outputs ends. True: at once. False: when no unfinished
            output has a better score at its present length. `never`: when none can get a better score.
        stop_token_ids: tokens that end an output, besides the EOS tokens of the model.
        ignore_eos: whether the EOS tokens of the model do not end an output.

    Raises:
        ConfigError: a value is outside of its range, or not finite.
    """

    max_tokens: PositiveInt
    num_beams: PositiveInt = 4
    length_penalty: FiniteFloat = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "beams", _REMEDIES)


@dataclasses.dataclass(frozen=True)
class Beam:
    """A finished output of a beam search.

    Attributes:
        ids: the tokens, an EOS token included.
        text: their text without that of an EOS token; empty without a tokenizer.
        logprob: the sum of their log-probabilities.
        score: see `BeamOptions`.
        finish_reason: `stop` after an EOS or stop token, `length` after `max_tokens`.
    """

    ids: tuple[int, ...]
    text: str
    logprob: float
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """The beam search of one prompt, without the model.

    ```python
    search = BeamSearch(options, stop_token_ids)
    while search.unfinished:
        search.advance(most_likely(prompt + ids, search.num_candidates) for ids in search.unfinished)
    ```

    Args:
        options: the options.
        stop_token_ids: the tokens that end an output, those of the model among them.

    Attributes:
        unfinished: the tokens of each unfinished output, the most likely first; empty when the search has ended.
        finished: the best finished outputs, the best first; as many as `num_beams` when the search has ended, if the
            vocabulary allows.
        num_candidates: how many of the most likely next tokens of each output a step needs. With fewer, EOS tokens
            could displace tokens that continue an output.
    """

    def __init__(self, options: BeamOptions, stop_token_ids: Collection[int] = ()):
        self._options, self._stop_token_ids = options, frozenset(stop_token_ids)
        self.unfinished: list[tuple[int, ...]] = [()]
        self._logprobs = [0.0]
        self.finished: list[Beam] = []
        self.num_candidates = options.num_beams + len(self._stop_token_ids)

    def advance(self, candidates: Iterable[Sequence[tuple[int, float]]]) -> None:
        """Extends each unfinished output by a token.

        Args:
            candidates: for each unfinished output, its most likely next tokens and their log-probabilities.
        """
        most, length = self._options.num_beams, len(self.unfinished[0]) + 1
        extended = [
            (logprob + more, (*ids, token))
            for ids, logprob, found in zip(self.unfinished, self._logprobs, candidates, strict=True)
            for token, more in found
        ]
        extended.sort(key=lambda each: -each[0])  # stable, so equal ones keep the order of their beams and tokens
        is_last, going_on = length == self._options.max_tokens, []
        for rank, (logprob, ids) in enumerate(extended):
            if ids[-1] not in self._stop_token_ids and not is_last:
                going_on.append((logprob, ids))
            elif rank < most:
                reason: FinishReason = "stop" if ids[-1] in self._stop_token_ids else "length"
                self.finished.append(Beam(ids, "", logprob, self._score(logprob, length), reason))
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:most]
        going_on = going_on[:most]
        if not going_on or self._has_ended(going_on[0][0], length):
            going_on = []
        self._logprobs = [logprob for logprob, _ in going_on]
        self.unfinished = [ids for _, ids in going_on]

    def _has_ended(self, best: float, length: int) -> bool:
        """Whether the finished outputs are final.

        Args:
            best: the largest log-probability of an unfinished output.
            length: the number of its tokens.
        """
        options = self._options
        if len(self.finished) < options.num_beams:
            return False
        if options.early_stopping is True:
            return True
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = options.max_tokens
        return self._score(best, length) <= self.finished[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self._options.length_penalty


def beam_search(
    generate: Callable[[list[Request]], list[Piece]],
    prompts: Iterable[tuple[int, ...]],
    options: BeamOptions,
    stop_token_ids: Collection[int],
    *,
    adapter: str | None = None,
) -> list[list[Beam]]:
    """The outputs of each prompt that a beam search finds, the best first, without their texts.

    Each step of the search is a request of one token after each unfinished output, those of all prompts together.

    Args:
        generate: returns the whole sample of each request, such as `Engine.generate`.
        prompts: the token ids of each prompt.
        options: the options.
        stop_token_ids: see `BeamSearch`.
        adapter: see `Request`.
    """
    searches = [(ids, BeamSearch(options, stop_token_ids)) for ids in prompts]
    while running := [(ids, search) for ids, search in searches if search.unfinished]:
        requests = [
            Request(
                ids + more,
                SamplingOptions(temperature=0.0, max_tokens=1, logprobs=search.num_candidates),
                adapter=adapter,
            )
            for ids, search in running
            for more in search.unfinished
        ]
        found = iter(generate(requests))
        for _, search in running:
            search.advance([_top(next(found)) for _ in search.unfinished])
    return [search.finished for _, search in searches]


def _top(piece: Piece) -> tuple[tuple[int, float], ...]:
    """The most likely tokens in place of the only token of a piece."""
    assert piece.logprobs is not None, "the request asks for log-probabilities"
    return piece.logprobs[0].top


_REMEDIES = {
    "max_tokens": "Give the maximum length of the output",
    "num_beams": "Use 4, or 1 for the greedy output",
    "length_penalty": "Use 0 to rank by log-probability, and 1 by its mean over the tokens",
    "early_stopping": "Use True, False or 'never'",
    "stop_token_ids": "Use the ids of the tokenizer, as in (2,)",
    "ignore_eos": "Use True or False",
}
