"""Answers of `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from axcore.infer import Engine, Piece, TokenLogprob
from axcore_serve.answers import Json, Sample, SampledAnswer, encoded, finite, requests_of
from axcore_serve.bodies import ChatBody, Message, NamedFunction, Tool
from axcore_serve.errors import ApiError
from axcore_serve.structured import structure_of
from axcore_serve.templates import TOOL_CALL, ChatTemplate
from axcore_serve.token_text import TokenText
from axcore_serve.tools import Call, ForcedCall, ToolText


class ChatAnswer(SampledAnswer):
    """The answers of a model in a chat.

    Args:
        engine: the engine.
        body: the request.
        adapter: the adapter of the request; None: the model alone.
        tokens: the text of tokens.
        template: the chat template; None: the model has none.

    Raises:
        ApiError: the request is not valid for the engine or the template.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, engine: Engine, body: ChatBody, adapter: str | None, tokens: TokenText, template: ChatTemplate | None
    ):
        if template is None:
            raise ApiError(400, "the model has no chat template. Use /v1/completions, or serve it with --chat-template")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs=true", param="top_logprobs")
        tools = body.tools if body.tool_choice != "none" else []
        forced = _forced(body)
        if tools and not (template.takes_tools and template.reads_calls):
            raise ApiError(
                400,
                "tools: the chat template of the model has no <tool_call>. Omit tools, or start the server with "
                "--chat-template and a template that has",
                param="tools",
            )
        messages = [_message(each, at) for at, each in enumerate(body.messages)]
        structure = structure_of(body, forced)
        if structure is not None and tools and not forced:
            message = f'{structure.param} excludes calls of tools. Omit one of them, or use tool_choice="none"'
            raise ApiError(400, message, param=structure.param)
        text = template(messages, [each.model_dump(exclude_none=True) for each in tools])
        if forced:
            text += f"{TOOL_CALL}\n"
        ids = encoded(engine, text, "messages", adds_special=False)
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted = requests_of(
            engine,
            [ids],
            body,
            {"ids": "messages", "max_tokens": limit, "logprobs": "top_logprobs"},
            structure,
            adapter,
            max_tokens=getattr(body, limit),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        names = [each.function.name for each in forced or tools]
        samples = [ChatSample(index, tokens, names, is_call=bool(forced)) for index in range(body.n)]
        super().__init__(body, wanted, samples, len(ids))


class ChatSample(Sample):
    """A choice of a chat.

    Args:
        index: the index of the choice.
        tokens: the text of tokens.
        functions: the functions that the model may call.
        is_call: whether the whole answer is a call.
    """

    def __init__(self, index: int, tokens: TokenText, functions: Sequence[str], *, is_call: bool):
        self._index, self._tokens = index, tokens
        self._tools: ForcedCall | ToolText | None = None
        if functions:
            self._tools = ForcedCall(functions) if is_call else ToolText(functions)
        self._text: list[str] = []
        self._calls: list[Call] = []
        self._logprobs: list[Json] | None = None
        self._finish: str | None = None

    def start(self) -> Iterator[Json]:
        yield self._choice({"role": "assistant", "content": "", "refusal": None})

    def add(self, piece: Piece) -> Iterator[Json]:
        logprobs = None
        if piece.logprobs is not None:
            found = [self._logprob(each) for each in piece.logprobs]
            self._logprobs = (self._logprobs or []) + found
            logprobs = {"content": found, "refusal": None}
        deltas = [delta for part in self._parts(piece) for delta in self._deltas(part)]
        if logprobs is not None and not deltas:
            deltas = [{}]
        for at, delta in enumerate(deltas):
            yield self._choice(delta, logprobs if at == 0 else None)
        if piece.finish_reason is not None:
            self._finish = "tool_calls" if self._calls and piece.finish_reason == "stop" else piece.finish_reason
            yield self._choice({}, finish=self._finish)

    def whole(self) -> Json:
        text = "".join(self._text)
        message: Json = {"role": "assistant", "content": text if text or not self._calls else None, "refusal": None}
        if self._calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self._calls
            ]
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish}

    def _parts(self, piece: Piece) -> Iterator[str | Call]:
        """Text and tool calls that are certain after a piece."""
        if self._tools is None:
            yield piece.text
            return
        yield from self._tools.add(piece.text)
        if piece.finish_reason is not None:
            yield self._tools.finish()

    def _deltas(self, part: str | Call) -> Iterator[Json]:
        if isinstance(part, str):
            if part:
                self._text.append(part)
                yield {"content": part}
            return
        self._calls.append(part)
        head = {
            "index": part.index,
            "id": part.id,
            "type": "function",
            "function": {"name": part.name, "arguments": ""},
        }
        yield {"tool_calls": [head]}
        yield {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}

    def _choice(self, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprob(self, found: TokenLogprob) -> Json:
        top = [self._token(id, value) for id, value in found.top]
        return {**self._token(found.id, found.logprob), "top_logprobs": top}

    def _token(self, id: int, logprob: float) -> Json:
        raw = self._tokens.raw(id)
        return {"token": self._tokens.name(id), "logprob": finite(logprob), "bytes": list(raw) if raw else None}


def _forced(body: ChatBody) -> list[Tool]:
    """The tools of which the answer must call one; empty if it need not.

    Raises:
        ApiError: there is none.
    """
    choice = body.tool_choice
    if choice == "required":
        found = body.tools
    elif isinstance(choice, NamedFunction):
        found = [each for each in body.tools if each.function.name == choice.name]
    else:
        return []
    if not found:
        name = "" if choice == "required" else f" a function {choice.name!r} in"
        raise ApiError(400, f"tool_choice requires{name} tools", param="tool_choice")
    return found


def _message(message: Message, at: int) -> dict[str, Any]:
    """A message as chat templates expect it.

    Raises:
        ApiError: the message has no content, or the arguments of a tool call are not a JSON object.
    """
    content, where = message.content, f"messages.{at}"
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise ApiError(400, f"{where}.content is required", param=f"{where}.content")
    text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
            for number, call in enumerate(message.tool_calls)
            for arguments in [_arguments(call.function.arguments, f"{where}.tool_calls.{number}.function.arguments")]
        ]
    return found


def _arguments(text: str, param: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ApiError(400, f"{param}: must be a JSON object in a string", param=param)
    return found
