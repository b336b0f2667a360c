"""The bytes of tokens, including those of incomplete characters, which the library `tokenizers` replaces by U+FFFD."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from axcore_hf.byte_level import characters

BytesDecoder = Callable[[Sequence[int]], bytes]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_decoder(tokenizer: Any) -> BytesDecoder:  # Any: `tokenizers` is imported when it is first used
    """A function from ids of the vocabulary to bytes. Special tokens have none.

    Where the bytes are valid UTF-8, they are those of `tokenizer.decode`. What invalid bytes become does not depend on
    later tokens, except in `tokenizer.decode` with byte tokens, which replaces the whole run of bytes.
    """
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    kinds = _kinds(tokenizer.decoder)
    if kinds == ["ByteLevel"]:
        return _byte_level(tokenizer, special)
    if "ByteFallback" in kinds:
        return _byte_fallback(tokenizer, special)

    def text(ids: Sequence[int]) -> bytes:
        found: str = tokenizer.decode(ids, skip_special_tokens=True)
        return found.encode()

    return text


def _kinds(decoder: Any) -> list[str]:
    """The types of a decoder, or of the decoders in a sequence."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [each["type"] for each in state.get("decoders", [state])]


def _byte_level(tokenizer: Any, special: set[int]) -> BytesDecoder:
    """A character of a token stands for a byte. Added tokens that have other characters are plain text."""
    byte_of = {character: byte for byte, character in enumerate(characters())}
    known: dict[int, bytes] = {id: b"" for id in special}

    def bytes_of(id: int) -> bytes:
        if id not in known:
            token = tokenizer.id_to_token(id) or ""
            found = [byte_of.get(character) for character in token]
            known[id] = token.encode() if None in found else bytes(byte for byte in found if byte is not None)
        return known[id]

    return lambda ids: b"".join(map(bytes_of, ids))


def _byte_fallback(tokenizer: Any, special: set[int]) -> BytesDecoder:
    """Tokens such as `<0x0A>` are bytes. Others are text, whose first space may be removed at the start."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True).items()
    byte_of = {id: int(match[1], 16) for token, id in vocabulary if (match := BYTE_TOKEN.fullmatch(token))}
    id_of = {byte: id for id, byte in byte_of.items()}

    def text(ids: Sequence[int]) -> bytes:
        found: str = tokenizer.decode(ids, skip_special_tokens=False)
        return found.encode()

    if len(id_of) < 256:  # unknown bytes become another token
        return text
    strips = not text([id_of[0x20]])

    def decode(ids: Sequence[int]) -> bytes:
        groups = itertools.groupby((id for id in ids if id not in special), key=lambda id: id in byte_of)
        runs = [(is_bytes, list(run)) for is_bytes, run in groups]
        raw = [bytes(byte_of[id] for id in run) if is_bytes else b"" for is_bytes, run in runs]
        if all(map(_is_text, raw)):
            return text([id for _, run in runs for id in run])
        parts = []
        for index, ((is_bytes, run), given) in enumerate(zip(runs, raw, strict=True)):
            if not is_bytes:
                # After a letter, a token is not at the start of a text.
                parts.append(text([id_of[0x41], *run])[1:] if index else text(run))
            else:
                parts.append(given[1:] if strips and not index and given.startswith(b" ") else given)
        return b"".join(parts)

    return decode


def _is_text(given: bytes) -> bool:
    try:
        given.decode()
    except UnicodeDecodeError:
        return False
    return True
