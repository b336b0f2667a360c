"""The HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from axcore.infer import Engine
from axcore.infer.requests import Pooling
from axcore_serve.answers import Answer, Json
from axcore_serve.bodies import Body, ChatBody, CompletionBody, EmbeddingBody
from axcore_serve.chat import ChatAnswer
from axcore_serve.completions import CompletionAnswer
from axcore_serve.embeddings import EmbeddingAnswer
from axcore_serve.errors import ApiError
from axcore_serve.gate import Gate, Keys, Limits
from axcore_serve.metrics import Metrics, snapshot
from axcore_serve.samples import Samples
from axcore_serve.templates import ChatTemplate
from axcore_serve.token_text import TokenText

CLIENT_LEFT = 499
"""The status in metrics if nobody waits for the answer."""

SEND_S = 10.0
"""Seconds that a client has to read a stream after its samples must have ended."""


class Service:
    """The endpoints.

    Args:
        engine: the engine, which must have a tokenizer.
        name: the name of the model in the API. Adapters of the engine are models with their own names.
        limits: the limits.
        keys: the API keys; empty: every request is accepted.
        template: the chat template; None: chats are refused.
        scores_prompts: whether the log-probabilities of prompts are available.
        pooling: how the hidden states of a text become its embedding; None: embeddings are refused.

    Attributes:
        app: the application, for a server such as uvicorn.
        gate: counts the requests, and drains.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        limits: Limits,
        *,
        keys: Collection[str] = (),
        template: ChatTemplate | None = None,
        scores_prompts: bool = False,
        pooling: Pooling | None = None,
    ):
        assert engine.tokenizer is not None, "a server requires a tokenizer"
        self.gate = Gate(limits)
        self._engine, self._name, self._limits = engine, name, limits
        self._template, self._scores_prompts, self._pooling = template, scores_prompts, pooling
        self._keys, self._tokens = Keys(keys), TokenText(engine.tokenizer)
        self._metrics = Metrics(engine, self.gate)
        self._created = int(time.time())
        self._page = importlib.resources.files("axcore_serve").joinpath("page.html").read_text(encoding="utf-8")
        self.app = Starlette(
            routes=[
                Route("/", self._index),
                Route("/health", self._health),
                Route("/metrics", self._metrics_page),
                Route("/stats", self._stats),
                self._guarded("GET", "/v1/models", self._models),
                self._guarded("GET", "/v1/models/{name:path}", self._one_model),
                self._guarded("POST", "/v1/completions", self._completions),
                self._guarded("POST", "/v1/chat/completions", self._chats),
                self._guarded("POST", "/v1/embeddings", self._embeddings),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _failure},
        )

    # Pages without a key

    async def _index(self, request: Request) -> Response:
        return HTMLResponse(self._page.replace("MODEL_NAME", json.dumps(self._name).replace("<", "\\u003c")))

    async def _health(self, request: Request) -> Response:
        if self._engine.is_closed:
            return JSONResponse({"status": "failed"}, 503)
        if self.gate.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    async def _metrics_page(self, request: Request) -> Response:
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4")

    async def _stats(self, request: Request) -> Response:
        return JSONResponse(snapshot(self._engine, self.gate))

    # The API

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self._models_now]})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(name := request.path_params["name"])
        return JSONResponse(self._described(name))

    async def _embeddings(self, request: Request) -> Response:
        return await self._answered(
            request,
            EmbeddingBody,
            lambda body: EmbeddingAnswer(self._engine, body, self._adapter(body), self._pooling),
        )

    async def _completions(self, request: Request) -> Response:
        return await self._answered(
            request,
            CompletionBody,
            lambda body: CompletionAnswer(
                self._engine, body, self._adapter(body), self._tokens, scores_prompts=self._scores_prompts
            ),
        )

    async def _chats(self, request: Request) -> Response:
        return await self._answered(
            request,
            ChatBody,
            lambda body: ChatAnswer(self._engine, body, self._adapter(body), self._tokens, self._template),
        )

    async def _answered[B: Body](self, request: Request, form: type[B], answer_of: Callable[[B], Answer]) -> Response:
        with contextlib.ExitStack() as held:
            held.enter_context(self.gate.request())
            content = await self._body(request)
            answer = await run_in_threadpool(self._understood, content, form, answer_of)
            held.enter_context(self.gate.samples(len(answer.wanted), answer.counted))
            samples = Samples(self._engine, answer.wanted, self._metrics, self._limits.request_s)
            held.callback(samples.close)
            if answer.is_stream:
                limit = self._limits.request_s + SEND_S
                return EventStream(_events(answer, samples), held.pop_all(), limit, self._metrics.disconnected.inc)
            return JSONResponse(await unless_gone(request.receive, _whole(answer, samples)))

    def _understood[B: Body](self, content: bytes, form: type[B], answer_of: Callable[[B], Answer]) -> Answer:
        """The answer to a body. Runs in a thread, because long texts take long to tokenize."""
        body = form.parse(content)
        self._check_model(body.model)
        return answer_of(body)

    @property
    def _models_now(self) -> tuple[str, ...]:
        """The model and its adapters, which may be loaded and unloaded at any time."""
        return (self._name, *self._engine.adapters)

    def _described(self, name: str) -> Json:
        described = {"id": name, "object": "model", "created": self._created, "owned_by": "axcore"}
        return described if name == self._name else {**described, "parent": self._name}

    def _adapter(self, body: Body) -> str | None:
        """The adapter of a request. If it was unloaded a moment ago, the engine refuses it."""
        return None if body.model == self._name else body.model

    def _check_model(self, name: str) -> None:
        if name not in self._models_now:
            raise ApiError(
                404,
                f"the model {name!r} does not exist. Use {' or '.join(map(repr, self._models_now))}",
                param="model",
                code="model_not_found",
            )

    async def _body(self, request: Request) -> bytes:
        """The body of a request.

        Raises:
            ApiError: it is too large, or takes too long to arrive.
        """
        most = self._limits.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {most} bytes. Send less", code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for part in request.stream():
                    content += part
                    if len(content) > most:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {self._limits.body_s:g} s", code="timeout") from error
        return bytes(content)

    def _guarded(self, method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
        """A route that requires a key, whose errors have the form of the API, and whose responses are counted."""

        async def guarded(request: Request) -> Response:
            status = 500
            try:
                self._keys.check(request.headers.get("authorization"))
                response = await endpoint(request)
                status = response.status_code
            except ApiError as error:
                response, status = error.response, error.status
            except ClientDisconnect:
                self._metrics.disconnected.inc()
                response, status = Response(status_code=CLIENT_LEFT), CLIENT_LEFT
            finally:
                self._metrics.responses.labels(path, status).inc()
            return response

        return Route(path, guarded, methods=[method])


class EventStream(Response):
    """Server-sent events.

    Args:
        events: the events.
        held: closed at the end, or when the client leaves.
        timeout_s: seconds after which a client that does not read counts as gone.
        on_gone: called if the client leaves.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        held: contextlib.ExitStack,
        timeout_s: float,
        on_gone: Callable[[], None],
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._held, self._timeout_s, self._on_gone = events, held, timeout_s, on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await unless_gone(receive, self._send(send))
            except (ClientDisconnect, TimeoutError):
                self._on_gone()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)  # others run between the events of pieces that have piled up
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves.

    Raises:
        ClientDisconnect: the client has left.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _events(answer: Answer, samples: Samples) -> AsyncIterator[bytes]:
    """The events of a stream. An error ends it without `[DONE]`."""
    for chunk in answer.start():
        yield _event(chunk)
    try:
        async for index, piece in samples:
            for chunk in answer.add(index, piece):
                yield _event(chunk)
    except ApiError as error:
        yield _event(error.body)
        return
    for chunk in answer.finish():
        yield _event(chunk)
    yield b"data: [DONE]\n\n"


def _event(value: Json) -> bytes:
    return b"data: " + json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


async def _whole(answer: Answer, samples: Samples) -> Json:
    async for index, piece in samples:
        for _ in answer.add(index, piece):
            pass
    return answer.whole()


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    return ApiError(
        error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers
    ).response


async def _failure(request: Request, error: Exception) -> Response:
    return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error").response
