"""Tool calls in the text of a model."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Collection, Iterator

from axcore_serve.templates import TOOL_CALL

END = "</tool_call>"


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call.

    Attributes:
        index: the number of calls before it in the answer.
        id: a new identifier.
        name: the function.
        arguments: a JSON object.
    """

    index: int
    id: str
    name: str
    arguments: str


class ToolText:
    """Separates tool calls from the other text of an answer, while it arrives.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as of Hermes and Qwen models. What is not a
    call of a known function stays text. Text is held back only while it may be part of a call.

    Args:
        names: the functions.

    Attributes:
        num_calls: the number of calls so far.
    """

    def __init__(self, names: Collection[str]):
        self.num_calls = 0
        self._names, self._held = frozenset(names), ""

    def add(self, text: str) -> Iterator[str | Call]:
        """The text and the calls that are certain after more text."""
        self._held += text
        while self._held:
            start = self._held.find(TOOL_CALL)
            if start < 0:
                size = len(self._held) - _overlap(self._held, TOOL_CALL)
                if size:
                    yield self._taken(size)
                return
            if start:
                yield self._taken(start)
            end = self._held.find(END)
            if end < 0:
                return
            raw = self._taken(end + len(END))
            call = call_of(raw[len(TOOL_CALL) : -len(END)], self._names, self.num_calls)
            self.num_calls += call is not None
            yield call or raw

    def finish(self) -> str:
        """The text that was held back."""
        return self._taken(len(self._held))

    def _taken(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken


class ForcedCall:
    """Reads an answer that is one tool call, whose text starts after `<tool_call>`.

    Args:
        names: the functions.
    """

    def __init__(self, names: Collection[str]):
        self._names, self._held = frozenset(names), ""

    def add(self, text: str) -> Iterator[str | Call]:
        """Holds text back until the call is complete."""
        self._held += text
        yield from ()

    def finish(self) -> str | Call:
        """The call; the text if it is incomplete."""
        return call_of(self._held, self._names, 0) or self._held


def call_of(text: str, names: Collection[str], index: int) -> Call | None:
    """The call that a text is; None if it is not a call of one of some functions."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    arguments = found.get("arguments", {}) if isinstance(found, dict) else None
    name = found.get("name") if isinstance(arguments, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    return Call(index, f"call_{uuid.uuid4().hex[:24]}", name, json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, word: str) -> int:
    """The length of the longest end of a text that is the start of a word."""
    return next(size for size in range(min(len(text), len(word) - 1), -1, -1) if text.endswith(word[:size]))
