"""What the answers of completions and chats have in common."""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from axcore.config import AxcoreError
from axcore.infer import Engine, Piece, Request, SamplingOptions
from axcore_serve.bodies import SamplingBody
from axcore_serve.errors import ApiError, of_options
from axcore_serve.samples import Wanted
from axcore_serve.structured import Structure

type Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""What JSON has in place of minus infinity."""


class Sample(abc.ABC):
    """The choice of one sample in an answer."""

    @abc.abstractmethod
    def start(self) -> Iterator[Json]:
        """The choices of a stream before the first piece."""

    @abc.abstractmethod
    def add(self, piece: Piece) -> Iterator[Json]:
        """The choices of a stream for a piece."""

    @abc.abstractmethod
    def whole(self) -> Json:
        """The choice of an answer without a stream, after the last piece."""


class Answer(abc.ABC):
    """A request that was understood, and the answer to it.

    Args:
        wanted: the samples to compute.
        is_stream: whether the answer is a stream.
    """

    counted: ClassVar[str] = "n"
    """The parameter that determines the number of samples."""

    def __init__(self, wanted: Sequence[Wanted], *, is_stream: bool):
        self.wanted, self.is_stream = tuple(wanted), is_stream

    def start(self) -> Iterator[Json]:
        """The chunks of a stream before the first piece."""
        yield from ()

    @abc.abstractmethod
    def add(self, index: int, piece: Piece) -> Iterator[Json]:
        """The chunks of a stream for a piece of a sample."""

    def finish(self) -> Iterator[Json]:
        """The chunks of a stream after the last piece."""
        yield from ()

    @abc.abstractmethod
    def whole(self) -> Json:
        """The answer without a stream, after the last piece of each sample."""


class SampledAnswer(Answer):
    """An answer whose choices are samples.

    Args:
        body: the body of the request.
        wanted: the samples to compute.
        samples: the choice of each.
        num_prompt: the number of tokens of the prompts.
    """

    kind: ClassVar[str]
    """The `object` of the answer."""
    chunk_kind: ClassVar[str]
    """The `object` of the chunks of a stream."""
    prefix: ClassVar[str]
    """The start of the `id` of an answer."""

    def __init__(self, body: SamplingBody, wanted: Sequence[Wanted], samples: Sequence[Sample], num_prompt: int):
        super().__init__(wanted, is_stream=body.stream)
        self._samples, self._includes_usage = samples, body.includes_usage
        self._num_prompt, self._num_cached, self._num_output = num_prompt, 0, 0
        self._samples_of_a_prompt = body.n
        self._facts = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    def start(self) -> Iterator[Json]:
        for sample in self._samples:
            yield from map(self._chunk, sample.start())

    def add(self, index: int, piece: Piece) -> Iterator[Json]:
        self._num_output += self._counted(piece)
        if index % self._samples_of_a_prompt == 0:  # the other samples share its prompt, which counts once
            self._num_cached += piece.num_cached
        yield from map(self._chunk, self._samples[index].add(piece))

    def finish(self) -> Iterator[Json]:
        if self._includes_usage:
            yield {**self._facts, "object": self.chunk_kind, "choices": [], "usage": self._usage}

    def whole(self) -> Json:
        choices = [sample.whole() for sample in self._samples]
        return {**self._facts, "object": self.kind, "choices": choices, "usage": self._usage}

    def _counted(self, piece: Piece) -> int:
        """The number of tokens of a piece that the usage counts."""
        return len(piece.ids)

    def _chunk(self, choice: Json) -> Json:
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._facts, "object": self.chunk_kind, "choices": [choice], **usage}

    @property
    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


def requests_of(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    body: SamplingBody,
    names: Mapping[str, str],
    structure: Structure | None,
    adapter: str | None,
    **fields: Any,
) -> list[Wanted]:
    """The samples for `n` samples of each prompt, in the order of their indices.

    Args:
        names: the parameters of the endpoint for fields of `SamplingOptions` and `Request`.
        structure: what the output must match; None: anything.
        adapter: the adapter of the request; None: the model alone.
        fields: further fields of `SamplingOptions`.

    Raises:
        ApiError: the options or the prompts are not valid for the engine.
    """
    if structure is not None:
        fields, names = {**fields, "grammar": structure.grammar}, {**names, "grammar": structure.param}
    try:
        options = SamplingOptions(**body.sampling, **fields)
        found = [Request(tuple(ids), options, body.priority, body.cache_salt, adapter) for ids in prompts]
        for request in found:
            engine.check(request)
    except AxcoreError as error:
        raise of_options(error, {**names, "adapter": "model"}) from error
    return [Wanted(request, sample) for request in found for sample in range(body.n)]


def encoded(engine: Engine, text: str, param: str, *, adds_special: bool = True) -> list[int]:
    """The token ids of a text.

    Args:
        adds_special: whether to add the tokens that start a prompt. If not, the text has them.

    Raises:
        ApiError: the text has no tokens.
    """
    assert engine.tokenizer is not None, "a server requires a tokenizer"
    content = text.encode()
    try:
        ids = engine.tokenizer.prompt(content) if adds_special else engine.tokenizer.encode(content)
    except AxcoreError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error
    found: list[int] = ids.tolist()
    return found


def finite(logprob: float) -> float:
    """A log-probability for JSON."""
    return max(logprob, LEAST_LOGPROB)
