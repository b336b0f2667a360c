"""Answers of `/v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from axcore.config import AxcoreError
from axcore.infer import Engine, Piece, Request, SamplingOptions
from axcore.infer.embeddings import normalized
from axcore.infer.requests import Pooling
from axcore_serve.answers import Answer, Json, encoded
from axcore_serve.bodies import EmbeddingBody
from axcore_serve.errors import ApiError, of_options
from axcore_serve.samples import Wanted


class EmbeddingAnswer(Answer):
    """The embeddings of one or more texts, each of length 1.

    Args:
        engine: the engine.
        body: the request.
        adapter: the adapter of the request; None: the model alone.
        pooling: how hidden states are pooled; None: the server offers no embeddings.

    Raises:
        ApiError: the request is not valid for the engine.
    """

    counted = "input"

    def __init__(self, engine: Engine, body: EmbeddingBody, adapter: str | None, pooling: Pooling | None):
        if pooling is None:
            raise ApiError(400, "embeddings require a server that was started with --embeddings", code="unsupported")
        prompts = [encoded(engine, each, "input") if isinstance(each, str) else each for each in body.input]
        try:
            options = SamplingOptions(max_tokens=1)
            fields = options, body.priority, body.cache_salt, adapter, pooling
            requests = [Request(tuple(ids), *fields) for ids in prompts]
            for request in requests:
                engine.check(request)
        except AxcoreError as error:
            raise of_options(error, {"ids": "input", "adapter": "model"}) from error
        super().__init__([Wanted(request, 0) for request in requests], is_stream=False)
        self._model, self._is_base64 = body.model, body.encoding_format == "base64"
        self._dimensions = body.dimensions
        self._num_tokens, self._num_cached = sum(map(len, prompts)), 0
        self._found: dict[int, Float[np.ndarray, " embed"]] = {}

    def add(self, index: int, piece: Piece) -> Iterator[Json]:
        """Keeps an embedding.

        Raises:
            ApiError: the request asks for another number of dimensions.
        """
        self._num_cached += piece.num_cached
        if piece.embedding is not None:
            self._found[index] = normalized(piece.embedding)
            if self._dimensions not in (None, piece.embedding.size):
                raise ApiError(
                    400,
                    f"dimensions={self._dimensions}: an embedding of this model has {piece.embedding.size} numbers, "
                    f"and a part of it is not an embedding. Omit dimensions",
                    param="dimensions",
                )
        yield from ()

    def whole(self) -> Json:
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(self._found[index])}
            for index in range(len(self.wanted))
        ]
        usage = {
            "prompt_tokens": self._num_tokens,
            "total_tokens": self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _encoded(self, embedding: Float[np.ndarray, " embed"]) -> str | list[float]:
        """The numbers, or the base64 text of the little-endian float32 array."""
        if self._is_base64:
            return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
        numbers: list[float] = embedding.tolist()
        return numbers
