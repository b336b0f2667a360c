"""A sample of an engine, and the pieces that its tokens become."""

from __future__ import annotations

import dataclasses

import numpy as np

from axcore.config import AxcoreError
from axcore.infer.disaggregation.handover import Export
from axcore.infer.embeddings import PooledStates
from axcore.infer.execution.step_in_flight import SampledToken
from axcore.infer.guide import Guide
from axcore.infer.requests import Piece, TokenLogprob
from axcore.infer.sampling import Seed
from axcore.infer.sequences import Sequence
from axcore.infer.streams import Deliver
from axcore.infer.text import TextStream


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample that has not ended.

    Attributes:
        sequence: its tokens, which the scheduler knows.
        deliver: receives its pieces.
        seed: the words of its seed.
        text: converts its tokens to text and finds stop strings; None: pieces have no text.
        guide: follows its grammar; None: it has none.
        pooled: the hidden states of the prompt so far; None: the request does not ask for an embedding.
        export: receives its first token and the state of its prompt, in place of `deliver`; None: it goes on here.
        prompt_scores: the log-probabilities of the prompt so far, by position.
    """

    sequence: Sequence
    deliver: Deliver
    seed: Seed
    text: TextStream | None = None
    guide: Guide | None = None
    pooled: PooledStates | None = None
    export: Export | None = None
    prompt_scores: dict[int, TokenLogprob] = dataclasses.field(default_factory=dict)

    def piece(self, new: list[SampledToken]) -> Piece:
        """The next piece. A stop string or the end of the grammar ends the sequence, too.

        Args:
            new: the tokens that were added to `sequence`. Those after an end that is found here are removed from it.
        """
        sequence, text = self.sequence, ""
        is_first = sequence.num_output == len(new)
        for at, each in enumerate(new):
            is_end = sequence.finish_reason == "stop" and at == len(new) - 1
            if self.guide is not None and not is_end:
                self.guide.accept(each.token)
            if self.text is not None:
                text += self.text.add((each.token,))
            if self._has_ended:
                sequence.drop(len(new) - 1 - at)
                sequence.finish_reason = "stop"
                new = new[: at + 1]
                break
        if self.text is not None and sequence.finish_reason is not None:
            text += self.text.finish()
        scores = None
        if is_first and sequence.request.options.prompt_logprobs:
            scores = tuple(self.prompt_scores[at] for at in range(1, len(sequence.request.ids)))
        return Piece(
            ids=tuple(each.token for each in new),
            text=text,
            logprobs=tuple(each.logprob for each in new if each.logprob is not None) or None,
            finish_reason=sequence.finish_reason,
            prompt_logprobs=scores,
            num_cached=(sequence.num_cached or 0) if is_first else 0,
        )

    @property
    def _has_ended(self) -> bool:
        """Whether its grammar or a stop string ends it."""
        has_stopped = self.text is not None and self.text.stopped is not None
        return has_stopped or (self.guide is not None and self.guide.has_ended)

    def embedding(self) -> Piece | AxcoreError:
        """The only piece of a request for an embedding, when the whole prompt is computed."""
        assert self.pooled is not None, "the request does not ask for an embedding"
        embedding = self.pooled.embedding(len(self.sequence.request.ids))
        if not np.isfinite(embedding).all():
            return AxcoreError("the hidden states are not finite. Check the weights")
        return Piece((), finish_reason="length", embedding=embedding, num_cached=self.sequence.num_cached or 0)

    @property
    def failure(self) -> AxcoreError:
        """Why none of its next tokens can be sampled."""
        if self.guide is not None and self.guide.failure is not None:
            return self.guide.failure
        return AxcoreError(
            "no token can be sampled: the logits are not finite, or the grammar, logit_bias and min_tokens exclude "
            "every token. Check the weights and the sampling options"
        )
