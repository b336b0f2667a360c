"""Structured outputs: what the text of an answer must match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from axcore.config import AxcoreError
from axcore.infer import Grammar
from axcore_serve.bodies import ChatBody, ResponseFormat, SamplingBody, StructuredOutputs, Tool
from axcore_serve.errors import ApiError, of_options


class Structure(NamedTuple):
    """A grammar, and the parameter that asks for it."""

    grammar: Grammar
    param: str


def structure_of(body: SamplingBody, forced: Sequence[Tool] = ()) -> Structure | None:
    """What an answer must match; None: anything.

    Args:
        body: the body.
        forced: the tools of which the answer must call one.

    Raises:
        ApiError: two parameters ask for it, or the grammar is not valid.
    """
    asked: dict[str, Any] = {"structured_outputs": body.structured_outputs, "tools": forced}
    if isinstance(body, ChatBody):
        asked["response_format"] = body.response_format if body.response_format != ResponseFormat(type="text") else None
    given = {param: value for param, value in asked.items() if value}
    if len(given) > 1:
        names = " and ".join(sorted("tool_choice" if param == "tools" else param for param in given))
        raise ApiError(400, f"{names} exclude each other. Omit one of them", param=min(given))
    for param, value in given.items():
        try:
            return Structure(_grammar(value), param)
        except AxcoreError as error:
            raise of_options(error, {"grammar": param}) from error
    return None


def _grammar(asked: ResponseFormat | StructuredOutputs | Sequence[Tool]) -> Grammar:
    if isinstance(asked, ResponseFormat):
        return Grammar.json_object() if asked.json_schema is None else Grammar.json_schema(asked.json_schema.schema_)
    if not isinstance(asked, StructuredOutputs):
        return Grammar.json_schema(call_schema(asked))
    if asked.regex is not None:
        return Grammar.regex(asked.regex)
    if asked.choice is not None:
        return Grammar.choice(asked.choice)
    if asked.grammar is not None:
        return Grammar.rules(asked.grammar)
    return Grammar.json_object() if asked.json_ is None else Grammar.json_schema(asked.json_)


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of a call of one of some functions: an object with its name and its arguments."""
    functions = [tool.function for tool in tools]
    return {
        "$defs": {each.name: _moved(each.parameters or {"type": "object"}, each.name) for each in functions},
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": each.name}, "arguments": {"$ref": f"#/$defs/{each.name}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for each in functions
        ],
    }


def _moved(schema: Any, name: str) -> Any:
    """A schema whose references to its own parts hold in `$defs` of another one."""
    if isinstance(schema, list):
        return [_moved(each, name) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/{name}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, name)
        for key, value in schema.items()
    }
