"""What users do with an engine: streams, batches, beam search, scores and embeddings."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from axcore.config import ConfigError, PositiveInt
from axcore.config.types import conforms
from axcore.infer.beams import Beam, BeamOptions, beam_search
from axcore.infer.embeddings import normalized
from axcore.infer.requests import Piece, Pooling, Request, SamplingOptions, TokenLogprob
from axcore.infer.streams import Deliver, Stream, pieces_of
from axcore.infer.text import TextStream

if TYPE_CHECKING:
    from axcore.train.data.tokenizers import Tokenizer


class BaseEngine(abc.ABC):
    """Base of engines: the methods that need no more than `check` and `submit`.

    Attributes:
        tokenizer: converts text to tokens and back; None: requests and pieces have no text.
        eos_ids: the tokens that end a sample.
    """

    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]

    @abc.abstractmethod
    def check(self, request: Request) -> None:
        """Checks a request without queueing it. May be called from any thread. Compiles its grammar, which may take
        long if no recent request had it.

        Raises:
            ConfigError: `request` is not a `Request`, it does not fit, a token id is not in the vocabulary, a stop
                string requires a tokenizer, the grammar is not valid or not supported, or the adapter is not loaded.
        """

    @abc.abstractmethod
    def submit(self, request: Request, deliver: Deliver, *, sample: int = 0) -> Callable[[], None]:
        """Queues a request.

        Args:
            request: the prompt and the options.
            deliver: receives the pieces of the sample, the last of which has a `finish_reason`, or an error.
                If it raises, the exception is logged and the sample ends.
            sample: the index of the sample, if a request has several: it changes what a seed draws.

        Returns:
            A function that cancels the request. It may be called at any time, from any thread.

        Raises:
            ConfigError: see `check`.
            AxcoreError: the engine is closed.
        """

    def request(self, prompt: str, options: SamplingOptions | None = None, *, adapter: str | None = None) -> Request:
        """A request for a text.

        Raises:
            ConfigError: the engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError("engine.request requires a tokenizer. Give the engine one, or create a Request of ids")
        ids = self.tokenizer.prompt(prompt.encode("utf-8", "surrogateescape"))
        return Request(tuple(ids.tolist()), options or SamplingOptions(), adapter=adapter)

    def stream(self, request: Request, *, sample: int = 0) -> Stream:
        """Submits a request. Returns an iterator over the pieces of the sample; for errors see `submit`."""
        return Stream(functools.partial(self.submit, request, sample=sample))

    def astream(self, request: Request, *, sample: int = 0) -> AsyncIterator[Piece]:
        """`stream` for asyncio. It submits when the first piece is awaited. A consumer that stops early cancels."""
        check = functools.partial(self.check, request)
        return pieces_of(functools.partial(self.submit, request, sample=sample), check)

    def generate(self, requests: Iterable[Request], *, n: int = 1) -> list[Piece]:
        """Computes the samples of several requests together, each as one piece.

        Args:
            requests: the requests.
            n: the number of samples of each request, which compute its prompt once if the caches have pages.

        Returns:
            The samples of the first request, then those of the second, and so on.

        Raises:
            AxcoreError: a request does not fit, or the engine failed.
        """
        if not conforms(n, PositiveInt):
            raise ConfigError(f"engine.generate: n must be an int of at least 1, not {n!r}")
        if isinstance(requests, str | Request):
            raise ConfigError("engine.generate takes a list of requests, not one. Use engine.generate([request])")
        streams = [self.stream(request, sample=sample) for request in requests for sample in range(n)]
        try:
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()

    def beam_search(
        self, prompts: Iterable[str | Sequence[int]], options: BeamOptions, *, adapter: str | None = None
    ) -> list[list[Beam]]:
        """The most likely outputs of each prompt that a beam search finds.

        Each step of the search submits a request for one token after each unfinished output, those of all prompts
        together. With prefix caching, it computes at most one page of tokens for each output; otherwise all its tokens.
        More than 20 beams and EOS tokens compile another program.

        Args:
            prompts: the text or the token ids of each prompt.
            options: the options.
            adapter: the name of a loaded adapter; None: the model alone.

        Returns:
            For each prompt the outputs, the best score first.

        Raises:
            AxcoreError: a prompt is empty or does not fit with `max_tokens`, or the engine failed.
            ConfigError: a prompt is a text, and the engine has no tokenizer; or the vocabulary has fewer tokens than
                `options.num_beams` and EOS tokens.
        """
        given = SamplingOptions(
            max_tokens=options.max_tokens, stop_token_ids=options.stop_token_ids, ignore_eos=options.ignore_eos
        )
        rows = list(self._ids(prompts))
        for ids in rows:
            self.check(Request(ids, given, adapter=adapter))
        stop_token_ids = given.all_stop_token_ids(self.eos_ids)
        found = beam_search(self.generate, rows, options, stop_token_ids, adapter=adapter)
        return [[self._with_text(ids, beam) for beam in beams] for ids, beams in zip(rows, found, strict=True)]

    def _with_text(self, prompt: tuple[int, ...], beam: Beam) -> Beam:
        if self.tokenizer is None:
            return beam
        stream = TextStream(self.tokenizer, prompt=prompt)
        text = stream.add(beam.ids) + stream.finish()
        return dataclasses.replace(beam, text=text)

    def score(
        self, prompts: Iterable[str | Sequence[int]], *, adapter: str | None = None
    ) -> list[tuple[TokenLogprob, ...]]:
        """The log-probability of each token of some rows but the first, given the tokens before it.

        Args:
            prompts: the text or the token ids of each row, fewer tokens than `max_len`.
            adapter: the name of a loaded adapter; None: the model alone.

        Raises:
            AxcoreError: a row does not fit, or the engine failed.
            ConfigError: a prompt is a text, and the engine has no tokenizer.
        """
        options = SamplingOptions(temperature=0.0, max_tokens=1, prompt_logprobs=True)
        pieces = self.generate(Request(ids, options, adapter=adapter) for ids in self._ids(prompts))
        return [piece.prompt_logprobs or () for piece in pieces]

    def embed(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        adapter: str | None = None,
    ) -> list[Float[np.ndarray, " embed"]]:
        """The embedding of each prompt: the hidden states of the last layer after the final norm, pooled.

        Args:
            prompts: the text or the token ids of each prompt, fewer tokens than `max_len`.
            pooling: `last`: the state of the last token; `mean`: the mean over all tokens of the prompt, which uses no
                cached prefix.
            normalize: whether embeddings have length 1.
            adapter: the name of a loaded adapter; None: the model alone.

        Returns:
            A float32 array [embed] for each prompt.

        Raises:
            AxcoreError: a prompt is empty or does not fit, the hidden states are not finite, or the engine failed.
            ConfigError: a prompt is a text, and the engine has no tokenizer; or the model has no hidden states.
        """
        pieces = self.generate(
            Request(ids, SamplingOptions(max_tokens=1), adapter=adapter, pooling=pooling) for ids in self._ids(prompts)
        )
        found = [piece.embedding for piece in pieces if piece.embedding is not None]
        return [normalized(each) for each in found] if normalize else found

    def _ids(self, prompts: Iterable[str | Sequence[int]]) -> Iterator[tuple[int, ...]]:
        """The token ids of prompts."""
        given = prompts if isinstance(prompts, str) else list(prompts)
        if isinstance(given, str) or any(isinstance(prompt, int | np.integer) for prompt in given):
            raise ConfigError(f"expected a list of prompts, not the single prompt {given!r}. Write it as [prompt]")
        for prompt in given:
            yield self.request(prompt).ids if isinstance(prompt, str) else tuple(map(int, prompt))
