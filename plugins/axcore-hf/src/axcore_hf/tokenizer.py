"""Tokenizers of published models."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axcore.config import AxcoreError, ConfigError, NonNegativeInt
from axcore.train.data import Tokenizer
from axcore_hf.token_bytes import bytes_decoder

FILE = "tokenizer.json"
GENERATION = "generation_config.json"
DESCRIPTION, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
FILES = (FILE, DESCRIPTION, "special_tokens_map.json", TEMPLATE, GENERATION)
"""The files of a checkpoint that concern text."""


def read_files(folder: pathlib.Path) -> dict[str, bytes]:
    """The contents of those of `FILES` that a folder has, by name."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}


def replacing(file: pathlib.Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The text files of a model whose tokenizer is replaced by another `tokenizer.json` and the files next to it.

    Args:
        files: the files of the model, of which only `generation_config.json` is kept.
    """
    kept = {name: content for name, content in files.items() if name == GENERATION}
    return {**read_files(file.parent), FILE: file.read_bytes()} | kept


class HFTokenizer(Tokenizer):
    """The tokenizer in a `tokenizer.json`, run by the library `tokenizers`."""

    class Config(Tokenizer.Config):
        file: str
        """Path of a `tokenizer.json`. In a model folder, it is the file of that folder."""
        eos_ids: tuple[NonNegativeInt, ...] = ()
        """Ids that end a generated text. The first one also precedes each document of a corpus."""

        def inside(self, folder: pathlib.Path) -> HFTokenizer.Config:
            """The same config with the file in a model folder. A run's file is elsewhere and stays where it is."""
            inside, outside = folder / self.file, pathlib.Path(self.file).expanduser().absolute()
            return self.set(file=str(outside if outside.exists() and not inside.exists() else inside))

        def packed(self) -> tuple[HFTokenizer.Config, dict[str, bytes]]:
            """The same config with the file in a model folder, and the files that the folder must contain, by name.

            Raises:
                AxcoreError: the tokenizer does not exist.
            """
            file = pathlib.Path(self.file).expanduser()
            try:
                return self.set(file=FILE), {**read_files(file.parent), FILE: file.read_bytes()}
            except OSError as error:
                raise AxcoreError(f"{file}: {error.strerror}. Give the path of a tokenizer.json.") from error

    def __init__(self, cfg: Config):
        """
        Raises:
            AxcoreError: the file does not exist or is not a tokenizer.
            ConfigError: an id in `eos_ids` is not in the vocabulary.
        """
        from tokenizers import Tokenizer as Loaded

        content = None
        try:
            content = pathlib.Path(cfg.file).expanduser().read_text(encoding="utf-8")
            self._tokenizer: Any = Loaded.from_str(content)
            self._tokenizer.no_truncation()  # transformers ignores the limits in the file, too
            self._tokenizer.no_padding()
        except OSError as error:
            raise AxcoreError(f"{cfg.file}: {error.strerror}. Give the path of a tokenizer.json.") from error
        except Exception as error:  # `tokenizers` raises plain Exceptions
            raise AxcoreError(f"{cfg.file} is not a tokenizer: {error}") from error
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if bad := [number for number in cfg.eos_ids if not 0 <= number < self.vocab_size]:
            raise ConfigError(f"eos_ids={bad} are not in the vocabulary of {cfg.file}, which has {self.vocab_size} ids")
        self._decoded = bytes_decoder(self._tokenizer)
        self.chat_template, self.special_tokens = _chat(pathlib.Path(cfg.file).expanduser().parent)
        self._eos_ids = cfg.eos_ids
        self._separator_id = cfg.eos_ids[0] if cfg.eos_ids else None

    @property
    def separator_id(self) -> int:  # type: ignore[override]
        if self._separator_id is None:
            raise ConfigError("the tokenizer requires eos_ids, the first of which separates documents")
        return self._separator_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    def prompt(self, content: bytes) -> NDArray[np.integer]:
        ids = self._tokenizer.encode(content.decode(errors="replace")).ids
        if not ids:
            raise AxcoreError("the prompt is empty. Give some text to continue.")
        return np.asarray(ids, np.int32)

    def encode(self, content: bytes) -> NDArray[np.integer]:
        text = content.decode(errors="replace")
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: NDArray[np.integer]) -> bytes:
        return self._decoded([int(each) for each in np.asarray(ids) if 0 <= each < self.vocab_size])


def _chat(folder: pathlib.Path) -> tuple[str | None, dict[str, str]]:
    """The chat template and the special tokens in the files next to a tokenizer.

    Raises:
        AxcoreError: `tokenizer_config.json` is not a JSON object.
    """
    described, own = {}, folder / TEMPLATE
    if (file := folder / DESCRIPTION).is_file():
        try:
            described = json.loads(file.read_bytes())
            tokens = {name: value for name, value in described.items() if name.endswith("_token")}
        except (ValueError, AttributeError) as error:
            raise AxcoreError(f"{file} is not a JSON object: {error}") from error
        texts = {name: value["content"] if isinstance(value, dict) else value for name, value in tokens.items()}
        special = {name: text for name, text in texts.items() if isinstance(text, str)}
    else:
        special = {}
    if own.is_file():
        return own.read_text(encoding="utf-8"), special
    template = described.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template, special
