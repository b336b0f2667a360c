"""A step that runs on the device, and its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from axcore.infer.requests import TokenLogprob
from axcore.infer.sampling import LogProbs, Sampled, Verified
from axcore.infer.sequences import Chunk, Plan


class SampledToken(NamedTuple):
    """A sampled token, and its log-probability if the request asks for it."""

    token: int
    logprob: TokenLogprob | None


class SamplerCall(NamedTuple):
    """A call of the sampler: the chunk of each row that is not padding, and the result, which is on the device."""

    rows: Mapping[int, Chunk]
    found: Sampled | Verified


@dataclasses.dataclass(frozen=True)
class StepInFlight:
    """A step that was started. Its results are read later, when the device has computed them."""

    plan: Plan
    calls: list[SamplerCall]
    scores: list[tuple[Chunk, LogProbs]]
    """The log-probabilities of the token after each token of a chunk, for requests that ask for those of the prompt."""
    states: list[tuple[Chunk, Float[Array, "2 embed"]]]
    """The result of `chunk_states`, for requests that ask for an embedding."""

    def tokens(self) -> dict[int, list[SampledToken]]:
        """Waits for the tokens that each sequence sampled: the accepted drafts and the token after them.

        Returns:
            The tokens by the id of the sequence. There are none if every token is excluded or the logits are not
            finite. A sequence without output, such as that of an embedding, has one arbitrary token.
        """
        sampled = {chunk.sequence.id: [SampledToken(0, None)] for chunk, _ in self.states if chunk.is_last}
        for rows, on_device in self.calls:
            found: Sampled | Verified = jax.device_get(on_device)
            if isinstance(found, Sampled):
                found = Verified(found, (found.tokens >= 0).astype(np.int32))
            tokens, logprobs = found.sampled.tokens, found.sampled.logprobs
            width = len(tokens) // len(found.num_tokens)
            for row, chunk in rows.items():
                count = chunk.sequence.request.options.logprobs
                new = sampled[chunk.sequence.id] = []
                for at in range(row * width, row * width + int(found.num_tokens[row])):
                    token = int(tokens[at])
                    logprob = None
                    if count is not None and logprobs is not None:
                        logprob = _logprob(logprobs, at, token, count)
                    new.append(SampledToken(token, logprob))
        return sampled

    def prompt_logprobs(self) -> Iterator[tuple[int, int, TokenLogprob]]:
        """Waits for the log-probabilities of prompts. Yields (id of the sequence, position, log-probability) of each
        token of a prompt that follows a token of the step."""
        for chunk, on_device in self.scores:
            found: LogProbs = jax.device_get(on_device)
            sequence = chunk.sequence
            ids, count = sequence.request.ids, sequence.request.options.logprobs or 0
            for row, position in enumerate(range(chunk.start + 1, min(chunk.start + chunk.count + 1, len(ids)))):
                yield sequence.id, position, _logprob(found, row, ids[position], count)

    def hidden_states(self) -> Iterator[tuple[Chunk, Float[np.ndarray, "2 embed"]]]:
        """Waits for the hidden states of each chunk of a request that asks for an embedding; see `chunk_states`."""
        for chunk, on_device in self.states:
            yield chunk, jax.device_get(on_device)


def _logprob(found: LogProbs, row: int, token: int, count: int) -> TokenLogprob:
    top = zip(found.top_ids[row, :count].tolist(), found.top[row, :count].tolist(), strict=True)
    return TokenLogprob(token, float(found.token[row]), int(found.rank[row]), tuple(top))
