"""The text of single tokens, for log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from axcore.infer.text import Decodes, token_bytes


class TokenText:
    """The text of single tokens.

    Args:
        tokenizer: the tokenizer of the model.
    """

    def __init__(self, tokenizer: Decodes):
        self.raw = functools.lru_cache(maxsize=1 << 16)(functools.partial(token_bytes, tokenizer))

    def name(self, id: int) -> str:
        """The text of a token; its bytes if they are an incomplete character, and its id if it has none."""
        raw = self.raw(id)
        if not raw:
            return f"token_id:{id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def named(self, values: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Values by the names of tokens. Where two tokens have the same text, the later one is named by its id."""
        found: dict[str, float] = {}
        for id, value in values:
            name = self.name(id)
            found[f"token_id:{id}" if name in found else name] = value
        return found
