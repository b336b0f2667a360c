"""The bodies of requests."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from axcore_serve.errors import ApiError, of_body

MAX_SAMPLES = 128
MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
)
"""The parameters that are fields of `SamplingOptions`, except for `max_tokens` and `logprobs`."""


class Part(BaseModel):
    """Base class of the objects in a body. A parameter that is null has its default value."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _stops(value: object) -> object:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) and each for each in values):
        raise ValueError("must be a string or a list of strings, none of them empty")
    if len(values) > MAX_STOPS:
        raise ValueError(f"must have at most {MAX_STOPS} strings")
    return values


def _biases(value: object) -> object:
    if not isinstance(value, dict) or not all(str(key).isdecimal() and str(key).isascii() for key in value):
        raise ValueError('must be an object from token ids to numbers, such as {"42": -100}')
    found = {int(key): bias for key, bias in value.items()}
    if len(found) < len(value):
        raise ValueError("must have one bias for each token id")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. JSON parsers silently keep one of several values of a name, and may disagree which.

    Raises:
        ApiError: a name has several values.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ApiError(400, f"{name} is given twice. Remove one of the values", param=name)
        found[name] = value
    return found


def _prompts(value: object) -> object:
    """A list of prompts, each a string or a list of token ids."""
    values = value if isinstance(value, list) else [value]
    if values and all(type(each) is int for each in values):
        values = [values]
    if not values or not all(isinstance(each, str) or _is_ids(each) for each in values):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    return values


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


class StreamOptions(Part):
    """Options of a stream."""

    include_usage: bool = False


class StructuredOutputs(Part):
    """What the output must match, as in vLLM."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In the syntax of GBNF if it has `::=`, else of Lark."""
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for _, value in self) != 1:
            raise ValueError("must have one of json, regex, choice, grammar and json_object")
        return self


class Body(Part):
    """The parameters of every endpoint."""

    model: str
    user: str | None = None
    """Not used."""
    priority: int = 0
    cache_salt: str = ""

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Parses the body of a request.

        Raises:
            ApiError: it is not JSON, a name is given twice, or it does not have the form of the class.
        """
        try:
            given = pydantic_core.from_json(content, allow_inf_nan=False)  # stricter than json about text and numbers
            json.loads(content, object_pairs_hook=_unique)
        except ValueError as error:
            raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from error
        if not isinstance(given, dict):
            raise ApiError(400, "the body must be a JSON object")
        try:
            return cls.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise of_body(error, cls.model_fields) from error


class EmbeddingBody(Body):
    """The body of `/v1/embeddings`."""

    input: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class SamplingBody(Body):
    """The parameters that completions and chats share."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """See `Body`. A stream option also requires a stream."""
        body = super().parse(content)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options requires stream=true", param="stream_options")
        return body

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingOptions` that were given, except for `max_tokens` and `logprobs`."""
        found = {name: getattr(self, name) for name in SAMPLING}
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
            if value is not None
        }


class CompletionBody(SamplingBody):
    """The body of `/v1/completions`."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    max_tokens: int = Field(DEFAULT_COMPLETION_TOKENS, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)


class TextPart(Part):
    """A part of the content of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Part):
    """The function of a tool call in a message of the assistant."""

    name: str
    arguments: str


class ToolCall(Part):
    """A tool call in a message of the assistant."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Part):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None


class FunctionOfTool(Part):
    """The function that a tool calls."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionOfTool


class NamedFunction(Part):
    """The function that an answer must call."""

    name: str


def _tool_choice(value: object) -> object:
    if isinstance(value, dict) and set(value) == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and set(function) == {"name"} and isinstance(function["name"], str):
            return NamedFunction(name=function["name"])
    elif value in ("none", "auto", "required"):
        return value
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": NAME}}')


class JSONSchema(Part):
    """A JSON schema with its name."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    """Not used."""
    description: str | None = None
    """Not used."""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Answers match the schema in any case."""


class ResponseFormat(Part):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('must have json_schema if its type is "json_schema", and only then')
        return self


class ChatBody(SamplingBody):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] = []
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedFunction, BeforeValidator(_tool_choice)] = "auto"
    parallel_tool_calls: Literal[True] = True
    """An answer that must call a function has one call."""
    response_format: ResponseFormat | None = None
