"""Structured outputs and forced tool calls with the real client, from a model with random weights."""

import json
import re
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from axcore.nn import ContiguousCache
from axcore_guided.compiler import LLGuidance
from axcore_serve.structured import call_schema

from .scripted import Scripted
from .support import TEMPLATE, posted, serving, tiny_engine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Point(BaseModel, extra="forbid"):
    x: int = Field(ge=0, le=99)
    color: Literal["red", "green"]


class Box(BaseModel, extra="forbid"):
    corners: list[Point] = Field(max_length=2)
    label: str = Field(max_length=3)


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("draw", Box.model_json_schema()), tool("clear", {"type": "object", "additionalProperties": False})]
assert "$defs" in Box.model_json_schema()


@pytest.fixture(scope="module")
def running():
    grammars = LLGuidance.Config(whitespace=" ?")
    engine = tiny_engine(max_len=1200, grammars=grammars, cache=ContiguousCache.Config())
    with engine, serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def client(running):
    with running.client() as client:
        yield client


def test_the_client_parses_answers_in_the_form_of_a_class(client):
    for seed in range(3):
        found = client.chat.completions.parse(**HELLO, response_format=Box, seed=seed, max_tokens=300)
        assert isinstance(found.choices[0].message.parsed, Box)
        assert found.choices[0].finish_reason == "stop"


def test_a_json_object_is_one(client):
    stops = {"type": "json_object"}
    closing = {str(ord("}")): 30}
    found = client.chat.completions.create(**HELLO, response_format=stops, seed=1, max_tokens=300, logit_bias=closing)
    assert isinstance(json.loads(found.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[a-f]{4}"}, "[a-f]{4}"),
        ({"choice": ["yes", "no", "é"]}, "yes|no|é"),
        ({"json": {"enum": [12, "x"]}}, '12|"x"'),
        ({"json": '{"enum": [12, "x"]}'}, '12|"x"'),
        ({"grammar": 'start: "(" /[0-9]/ ")"'}, r"\([0-9]\)"),
        ({"grammar": 'root ::= "(" [0-9] ")"'}, r"\([0-9]\)"),
    ],
)
def test_structured_outputs_in_completions_and_chats(client, asked, pattern):
    extra = {"structured_outputs": asked}
    whole = client.completions.create(model="tiny", prompt="a", n=3, max_tokens=20, extra_body=extra)
    texts = [choice.text for choice in whole.choices]
    texts.append(client.chat.completions.create(**HELLO, extra_body=extra).choices[0].message.content)
    with client.chat.completions.create(**HELLO, extra_body=extra, stream=True) as stream:
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def called(client, choice, stream, seed):
    """Name, arguments, content and finish reason of the answer's only call."""
    body = {**HELLO, "tools": TOOLS, "tool_choice": choice, "seed": seed, "max_tokens": 300}
    if not stream:
        (found,) = client.chat.completions.create(**body).choices
        (call,) = found.message.tool_calls
        return call.function.name, call.function.arguments, found.message.content, found.finish_reason
    name, arguments, content, finish = "", "", None, None
    for chunk in client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        for each in choice.delta.tool_calls or ():
            name, arguments = name + (each.function.name or ""), arguments + (each.function.arguments or "")
        content, finish = choice.delta.content or content, choice.finish_reason
    return name, arguments, content, finish


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_has_valid_arguments(running, client, stream):
    names = set()
    for seed in range(6):
        name, arguments, content, finish = called(client, "required", stream, seed)
        names.add(name)
        assert (content, finish) == (None, "tool_calls")
        assert Box.model_validate_json(arguments) if name == "draw" else json.loads(arguments) == {}
    assert names == {"draw", "clear"}
    named = {"type": "function", "function": {"name": "draw"}}
    name, arguments, *_ = called(client, named, stream, 0)
    assert name == "draw" and Box.model_validate_json(arguments)


def test_an_incomplete_call_is_text(client):
    body = {**HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 5}
    (choice,) = client.chat.completions.create(**body).choices
    assert choice.message.content in ('{"nam', '{ "na')
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")


def test_the_prompt_of_a_forced_call_ends_with_its_start():
    call = b'{"name": "clear", "arguments": {}}'
    with serving(Scripted([*call, 256])) as running:
        with running.client() as client:
            client.chat.completions.create(**HELLO, tools=TOOLS, tool_choice="required")
        assert bytes(running.engine.jobs[-1].request.ids).endswith(b"assistant: <tool_call>\n")


def test_references_of_parameters_hold_inside_of_the_schema_of_calls():
    refers = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {}}, "items": [{"$ref": "#"}], "x": {"$ref": "other"}}
    found = call_schema([_tool("f", refers)])["$defs"]["f"]
    assert found["$defs"]["a"] == {"$ref": "#/$defs/f/$defs/b"}
    assert found["items"] == [{"$ref": "#/$defs/f"}] and found["x"] == {"$ref": "other"}


def _tool(name, parameters):
    from axcore_serve.bodies import Tool

    return Tool.model_validate(tool(name, parameters))


SCHEMA = {"name": "n", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', 'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must have json_schema"),
        ({"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format", "only then"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
            "response_format",
            'response_format: json_schema: Unimplemented keys: ["not"]',
        ),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "unclosed group"),
        (
            {"structured_outputs": {"regex": r"[^\s\S]"}},
            "structured_outputs",
            "no token of the vocabulary continues the text",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one and none empty"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "is not JSON"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", 'unknown name: "x"'),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs", "gbnf"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"json_object": True}, "response_format": {"type": "json_object"}}, None, "exclude"),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS}, "response_format", "excludes calls of tools"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice requires tools"),
        ({"tool_choice": "wat", "tools": TOOLS}, "tool_choice", 'must be "none", "auto", "required" or'),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS},
            "tool_choice",
            "tool_choice requires a function 'f' in tools",
        ),
        (
            {"tool_choice": "required", "tools": [tool("f", {"type": "wat"})]},
            "tools",
            "tools: json_schema: Invalid type: wat",
        ),
    ],
)
def test_case_bad_structures_are_refused(running, change, param, message):
    status, found = posted(running, {**HELLO, **change}, CHAT)
    assert status == 400 and message in found["error"]["message"], found
    assert param is None or found["error"]["param"] == param
    assert running.engine.stats.running == running.engine.stats.waiting == 0


def test_a_server_without_a_compiler_refuses_grammars():
    with tiny_engine() as engine, serving(engine, template=TEMPLATE) as running:
        body = {"model": "tiny", "prompt": "a", "structured_outputs": {"regex": "a"}}
        status, found = posted(running, body, COMPLETION)
        assert (status, found["error"]["param"]) == (400, "structured_outputs")
        assert found["error"]["message"].startswith("structured_outputs requires a grammar compiler. Install a plugin")
        with running.client() as client, pytest.raises(openai.BadRequestError, match="response_format requires a gram"):
            client.chat.completions.create(**HELLO, response_format={"type": "json_object"})
