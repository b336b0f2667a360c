"""Answers of `/v1/completions`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

import numpy as np

from axcore.infer import Engine, Piece, TokenLogprob
from axcore_serve.answers import Json, Sample, SampledAnswer, encoded, finite, requests_of
from axcore_serve.bodies import CompletionBody
from axcore_serve.errors import ApiError
from axcore_serve.structured import structure_of
from axcore_serve.token_text import TokenText


class CompletionAnswer(SampledAnswer):
    """The completions of one or more prompts.

    Args:
        engine: the engine.
        body: the request.
        adapter: the adapter of the request; None: the model alone.
        tokens: the text of tokens.
        scores_prompts: whether the log-probabilities of prompts are available.

    Raises:
        ApiError: the request is not valid for the engine.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, engine: Engine, body: CompletionBody, adapter: str | None, tokens: TokenText, *, scores_prompts: bool
    ):
        prompts = [encoded(engine, each, "prompt") if isinstance(each, str) else each for each in body.prompt]
        longest = max(map(len, prompts))
        asked = "max_tokens" in body.model_fields_set
        max_tokens = body.max_tokens if asked else max(1, min(body.max_tokens, engine.max_len - longest))
        scores = body.echo and body.logprobs is not None
        if max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens=0: must be at least 1 unless echo=true", param="max_tokens")
        if scores and not scores_prompts:
            raise ApiError(
                400,
                "echo=true with logprobs requires a server that was started with --prompt-logprobs. Omit one of them",
                param="echo",
            )
        # A prompt is scored by the step that samples its next token, which an answer of no tokens leaves out.
        wanted = requests_of(
            engine,
            prompts,
            body,
            {"ids": "prompt"},
            structure_of(body),
            adapter,
            max_tokens=max(1, max_tokens),
            logprobs=body.logprobs,
            prompt_logprobs=scores,
        )
        samples = [
            CompletionSample(at * body.n + each, tokens, ids, echo, has_output=max_tokens > 0)
            for at, (prompt, ids) in enumerate(zip(body.prompt, prompts, strict=True))
            for echo in [_shown(engine, prompt, ids) if body.echo else ""]
            for each in range(body.n)
        ]
        super().__init__(body, wanted, samples, sum(map(len, prompts)))
        self._max_tokens = max_tokens

    def _counted(self, piece: Piece) -> int:
        return len(piece.ids) if self._max_tokens else 0


class CompletionSample(Sample):
    """A choice of a completion.

    Args:
        index: the index of the choice.
        tokens: the text of tokens.
        prompt: the tokens of the prompt.
        echo: what precedes the text of the sample: the prompt, or nothing.
        has_output: whether the text of the sample is part of the choice.
    """

    def __init__(self, index: int, tokens: TokenText, prompt: Sequence[int], echo: str, *, has_output: bool):
        self._index, self._tokens, self._has_output = index, tokens, has_output
        self._prompt, self._echo = prompt, echo
        self._choices: list[Json] = []
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def start(self) -> Iterator[Json]:
        return iter(())

    def add(self, piece: Piece) -> Iterator[Json]:
        is_first = not self._choices
        text = (self._echo if is_first else "") + (piece.text if self._has_output else "")
        logprobs = None
        if piece.prompt_logprobs is not None:
            logprobs = self._logprobs([TokenLogprob(self._prompt[0], 0.0), *piece.prompt_logprobs])
            logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        elif is_first:
            self._offset = len(self._echo)
        if piece.logprobs is not None and self._has_output:
            new = self._logprobs(piece.logprobs)
            logprobs = new if logprobs is None else {name: logprobs[name] + new[name] for name in new}
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": self._finish(piece)}
        self._choices.append(choice)
        if text or logprobs is not None or piece.finish_reason is not None:
            yield choice

    def whole(self) -> Json:
        found = [choice["logprobs"] for choice in self._choices if choice["logprobs"] is not None]
        joined = {name: [each for some in found for each in some[name]] for name in found[0]} if found else None
        text = "".join(choice["text"] for choice in self._choices)
        return {**self._choices[-1], "text": text, "logprobs": joined}

    def _finish(self, piece: Piece) -> str | None:
        return piece.finish_reason if self._has_output or piece.finish_reason is None else "length"

    def _logprobs(self, found: Sequence[TokenLogprob]) -> Json:
        offsets = []
        for each in found:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(self._tokens.raw(each.id)))
        tops = [
            self._tokens.named((id, finite(value)) for id, value in {each.id: each.logprob, **dict(each.top)}.items())
            for each in found
        ]
        return {
            "tokens": [self._tokens.name(each.id) for each in found],
            "token_logprobs": [finite(each.logprob) for each in found],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _shown(engine: Engine, prompt: str | list[int], ids: list[int]) -> str:
    """The text of a prompt, without an incomplete character at its end, which the sample completes."""
    if isinstance(prompt, str):
        return prompt
    assert engine.tokenizer is not None
    return codecs.getincrementaldecoder("utf-8")("replace").decode(engine.tokenizer.decode(np.asarray(ids, np.int32)))
