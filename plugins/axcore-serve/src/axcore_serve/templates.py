"""Chat templates: from messages to the text of a prompt."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from axcore.config import AxcoreError
from axcore_serve.errors import ApiError

TOOL_CALL = "<tool_call>"
"""What precedes a tool call in the output of models whose calls can be read, and in their templates."""


class ChatTemplate:
    """A template in Jinja, with the names that templates of published checkpoints use.

    Args:
        text: the template.
        special_tokens: see `Tokenizer.special_tokens`.

    Attributes:
        takes_tools: whether the template uses `tools`.
        reads_calls: whether the model writes tool calls in a form that `ToolText` reads.

    Raises:
        AxcoreError: `text` is not a template.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(text)
            used = jinja2.meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError as error:
            raise AxcoreError(f"the chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.takes_tools = "tools" in used
        self.reads_calls = TOOL_CALL in text

    def __call__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of a prompt, special tokens included, up to the start of the next answer.

        Raises:
            ApiError: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages, tools=list(tools) or None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ApiError(
                400, f"messages: the chat template of the model refuses them: {error}", param="messages"
            ) from error


def _json(value: object, indent: int | None = None) -> str:
    """JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
