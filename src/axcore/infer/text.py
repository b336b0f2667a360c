"""The text of a sample while its tokens arrive."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BORDER_BYTES = 4
"""Bytes of the prompt that the start of the output may depend on: all but one of a UTF-8 character, and a space."""


class Decodes(Protocol):
    """What a `TextStream` requires of a tokenizer, such as `axcore.train.data.Tokenizer`."""

    def decode(self, ids: NDArray[np.integer]) -> bytes:
        """The bytes of `[tokens]` ids. More tokens only append bytes. Those of a token depend on itself and on the last
        token before it that has bytes."""


def token_bytes(tokenizer: Decodes, id: int) -> bytes:
    """The bytes of a token that is not the first of a text, since the first one may lack its space."""
    return _decoded(tokenizer, [id, id])[len(_decoded(tokenizer, [id])) :]


class TextStream:
    """Converts the tokens of one sample to text, token by token.

    The pieces of text, joined, are the text of all tokens, however these are grouped. Bytes of an incomplete character
    are held back until it is complete or the sample ends. So is the end of the text while it may be the start of a stop
    string. Invalid bytes become U+FFFD. Each token costs the same, whatever the length of the sample.

    ```python
    stream = TextStream(tokenizer, prompt=prompt, stop=("\\n\\n",))
    for ids in pieces:
        print(stream.add(ids), end="")
        if stream.stopped is not None:
            break
    print(stream.finish())
    ```

    Args:
        tokenizer: decodes tokens.
        prompt: the tokens before the sample, on which its first characters may depend, such as a space.
        stop: strings that end the text, which excludes them. The one that is complete first counts; of several that end
            with the same character, the longest. They are searched in the text of the sample only.

    Attributes:
        stopped: the stop string that was found, or None.
        num_tokens: the number of tokens of the text so far, up to the one that completed a stop string.
    """

    def __init__(self, tokenizer: Decodes, *, prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        self.stopped: str | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = _StopStrings(stop) if stop else None
        self._held = ""
        self._context, self._base = _border(tokenizer, prompt)
        self._utf8.decode(self._base)  # keeps an incomplete character at the end

    def add(self, ids: Iterable[int]) -> str:
        """The text that is certain after these tokens. Tokens after a stop string have no effect."""
        found = []
        for each in ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            found.append(self._passed(self._utf8.decode(self._bytes_of(int(each)))))
        return "".join(found)

    def finish(self) -> str:
        """The text that was held back, at the end of a sample. Add no tokens after it."""
        if self.stopped is not None:
            return ""
        text = self._passed(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds."""
        longer = [*self._context, token]
        found = _decoded(self._tokenizer, longer)[len(self._base) :]
        # A token may have no bytes only because it starts a text, such as a space.
        if found:
            for start in range(len(longer) - 1, -1, -1):
                if base := _decoded(self._tokenizer, longer[start:]):
                    self._context, self._base = longer[start:], base
                    break
        elif not self._base and _decoded(self._tokenizer, [token, token]):
            self._context = longer
        return found

    def _passed(self, text: str) -> str:
        """What may be shown of the text that was held back and `text`."""
        if self._stops is None:
            return text
        waiting = self._held + text
        for index, character in enumerate(text):
            match = self._stops.step(character)
            if match is not None:
                self.stopped, self._held = match, ""
                return waiting[: len(waiting) - len(text) + index + 1 - len(match)]
        shown = len(waiting) - self._stops.pending
        self._held = waiting[shown:]
        return waiting[:shown]


def _decoded(tokenizer: Decodes, ids: Sequence[int]) -> bytes:
    return tokenizer.decode(np.asarray(ids, np.int32))


def _border(tokenizer: Decodes, prompt: Sequence[int]) -> tuple[list[int], bytes]:
    """The end of the prompt, and its bytes."""
    count = 1
    while True:
        ids = [int(each) for each in prompt[-count:]]
        base = _decoded(tokenizer, ids) if ids else b""
        if len(base) >= BORDER_BYTES or count >= len(prompt):
            return ids, base
        count *= 2


class _StopStrings:
    """Finds the first occurrence of several strings, one character at a time (Aho and Corasick, 1975).

    Attributes:
        pending: the length of the longest end of the text that is the start of a string.
    """

    def __init__(self, strings: Sequence[str]):
        self._next: list[dict[str, int]] = [{}]
        self._depth, self._match = [0], [""]
        for string in strings:
            state = 0
            for character in string:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._match.append("")
                state = self._next[state][character]
            self._match[state] = string
        self._shorter = [0] * len(self._next)  # the longest proper end of a state that is also a state
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, after in self._next[state].items():
                self._shorter[after] = self._after(self._shorter[state], character)
                self._match[after] = self._match[after] or self._match[self._shorter[after]]
                queue.append(after)
        self._state = 0

    @property
    def pending(self) -> int:
        return self._depth[self._state]

    def step(self, character: str) -> str | None:
        """The string that ends with this character, or None."""
        self._state = self._after(self._state, character)
        return self._match[self._state] or None

    def _after(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)
